"""From which op to which op every storage of a trace is on the device.

    a = relu(x)          a lives from 0
    b = view(a)
    c = mm(b, w)                       to 2, the last op that reads a value that holds it

Inputs are there throughout (tangents from the first backward op on), outputs from when they are made to the end.  What
other open forwards hold is gone before the update.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from .trace import OTHERS, Op, Storage, Trace

# The op that makes a storage, the storage, and the indices of the first and the last op while which its bytes are held.
Span = tuple[Op, Storage, int, int]


@dataclass(frozen=True, slots=True)
class Life:
    """A storage, the indices of the first and the last op while which its bytes are held, and what it is."""

    storage: str
    nbytes: int
    first: int
    last: int
    kind: str
    maker: str  # the value that made it


def lifetimes(trace: Trace, some: Iterable[Span] | None = None) -> tuple[Life, ...]:
    """The life of every storage, or of `some`, in the order in which they are made."""
    said = {"watched": "gradient", "shard": "gradient"}
    handed = {storage: said.get(kind, kind) for kind, value in trace.outputs for storage in trace.op[value].holds}

    def life(op: Op, made: Storage, first: int, last: int) -> Life:
        kind = handed.get(made.name) or _kind(trace, op, last >= trace.boundary)
        return Life(made.name, made.nbytes, first, last, kind, op.name)

    return tuple(life(*span) for span in (spans(trace) if some is None else some))


def spans(trace: Trace) -> Iterator[Span]:
    """When each storage is held, in the order in which they are made."""
    read, end = last_reads(trace.ops), len(trace.ops) - 1
    ended = next((i for i, op in enumerate(trace.ops) if op.phase == "update"), end + 1) - 1 if trace.others else end
    handed = {storage for _, value in trace.outputs for storage in trace.op[value].holds}
    for index, op in enumerate(trace.ops):
        for made in op.makes:
            if op.is_input:
                last = ended if op.name == OTHERS else end
                yield op, made, trace.boundary if op.fn == "tangent" else 0, last
            else:
                yield op, made, index, end if made.name in handed else read[made.name]


def last_reads(ops: Sequence[Op]) -> dict[str, int]:
    """For each storage the index of the last op that reads a value that holds it, or that makes it."""
    holds = {op.name: op.holds for op in ops}
    last: dict[str, int] = {}
    for index, op in enumerate(ops):
        for made in op.makes:
            last[made.name] = index
        for read in op.reads:
            for storage in holds[read]:
                last[storage] = index
    return last


def _kind(trace: Trace, op: Op, crosses: bool) -> str:
    if op.is_input:
        return op.fn
    if op.fn == "memgraph.reload.default":
        home = trace.op[op.reads[0]]
        return home.fn if home.is_input else "activation"
    crosses_or_comes = (op.phase == "forward" and crosses) or op.fn == "memgraph.widen.default"
    return "activation" if crosses_or_comes else "temporary"
