"""From which op to which op every storage of a trace is on the device.

    a = relu(x)          a lives from 0
    b = view(a)
    c = mm(b, w)                       to 2, the last op that reads a value that holds it

Inputs are there throughout (tangents from the first backward op on), outputs from when they are made to the end.  In a
step whose outputs are `released` these are there to the end of forward, or to the last op that reads them, and tangents
to that: the caller has let go of them.  Numbers are never released: whoever calls backward() has its loss.  What other
open forwards hold is gone before the update.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from .ops import RELOAD, WIDEN
from .trace import OTHER_FORWARDS, Op, Storage, Trace

# The op that makes a storage, the storage, and the indices of the first and the last op while which its bytes are held.
Span = tuple[Op, Storage, int, int]


RELEASED = "released"  # the kind of an output that its caller lets go of before backward


@dataclass(frozen=True, slots=True)
class Lifetime:
    """A storage, the indices of the first and the last op while which its bytes are held, and what it is."""

    storage: str
    nbytes: int
    first: int
    last: int
    kind: str
    producer: str  # the value that made it


def lifetimes(trace: Trace, some: Iterable[Span] | None = None) -> tuple[Lifetime, ...]:
    """The life of every storage, or of `some`, in the order in which they are made."""
    said = {"watched": "gradient", "shard": "gradient", RELEASED: "output"}
    handed = {storage: said.get(kind, kind) for kind, value in trace.outputs for storage in trace.op[value].holds}

    def life(op: Op, made: Storage, first: int, last: int) -> Lifetime:
        kind = handed.get(made.name) or _kind(trace, op, last >= trace.boundary)
        return Lifetime(made.name, made.nbytes, first, last, kind, op.name)

    return tuple(life(*span) for span in (spans(trace) if some is None else some))


def spans(trace: Trace) -> Iterator[Span]:
    """When each storage is held, in the order in which they are made."""
    read, end, turn = last_reads(trace.ops), len(trace.ops) - 1, trace.boundary
    ended = (
        next((i for i, op in enumerate(trace.ops) if op.phase == "update"), end + 1) - 1 if trace.other_nbytes else end
    )
    handed = {storage for kind, value in trace.outputs if kind != RELEASED for storage in trace.op[value].holds}
    lent = {storage for kind, value in trace.outputs if kind == RELEASED for storage in trace.op[value].holds}
    for index, op in enumerate(trace.ops):
        for made in op.makes:
            if op.fn == "tangent":
                yield op, made, turn, max(turn, read[made.name]) if lent and not _is_number(op) else end
            elif op.is_input:
                yield op, made, 0, ended if op.name == OTHER_FORWARDS else end
            elif made.name in handed:
                yield op, made, index, end
            else:
                yield op, made, index, max(read[made.name], turn - 1) if made.name in lent else read[made.name]


def released(trace: Trace) -> Trace:
    """The step of a caller who lets go of its outputs before backward, and of what comes to backward; as it is, if it
    has no outputs but numbers."""

    def kind_of(kind: str, value: str) -> str:
        return RELEASED if kind == "output" and not _is_number(trace.op[value]) else kind

    return replace(trace, outputs=tuple((kind_of(kind, value), value) for kind, value in trace.outputs))


def _is_number(op: Op) -> bool:
    return op.type.endswith("[]")


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
    if op.fn == RELOAD:
        home = trace.op[op.reads[0]]
        return home.fn if home.is_input else "activation"
    crosses_or_comes = (op.phase == "forward" and crosses) or op.fn == WIDEN
    return "activation" if crosses_or_comes else "temporary"
