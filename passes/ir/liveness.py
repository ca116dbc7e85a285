"""The lifetime of every storage of a trace: from which op to which op it is on the device.

    a = relu(x)          a is live from 0
    b = view(a)
    c = mm(b, w)                       to 2, the last op that reads a value that holds it

Inputs are live throughout (tangents from the first backward op on), and outputs until the end.  The caller may release
outputs before backward: then they are live until the end of forward, or until their last read, as are tangents.
Scalars are never released, as the caller of backward() has the loss.  What other open forwards hold is freed before
the update.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from .ops import RELOAD, WIDEN
from .trace import OTHER_FORWARDS, Op, Storage, Trace

Span = tuple[
    Op, Storage, int, int
]  # the op that makes a storage, the storage, the first and the last op of its lifetime
RELEASED = "released"  # the kind of an output that the caller releases before backward


@dataclass(frozen=True, slots=True)
class Lifetime:
    """A storage, the indices of the first and the last op of its lifetime, and its kind."""

    storage: str
    nbytes: int
    first: int
    last: int
    kind: str
    producer: str  # the op that makes it


def lifetimes(trace: Trace, some: Iterable[Span] | None = None) -> tuple[Lifetime, ...]:
    """Return the lifetime of every storage, or of `some` spans, in the order in which they are made."""
    kinds = {"watched": "gradient", "shard": "gradient", RELEASED: "output"}
    returned = {storage: kinds.get(kind, kind) for kind, value in trace.outputs for storage in trace.op[value].holds}

    def life(op: Op, made: Storage, first: int, last: int) -> Lifetime:
        kind = returned.get(made.name) or _kind(trace, op, last >= trace.boundary)
        return Lifetime(made.name, made.nbytes, first, last, kind, op.name)

    return tuple(life(*span) for span in (spans(trace) if some is None else some))


def spans(trace: Trace) -> Iterator[Span]:
    """Yield the span of each storage, in the order in which they are made."""
    last, end, boundary = last_reads(trace.ops), len(trace.ops) - 1, trace.boundary
    update = next((i for i, op in enumerate(trace.ops) if op.phase == "update"), len(trace.ops))
    returned = {storage for kind, value in trace.outputs if kind != RELEASED for storage in trace.op[value].holds}
    early = {storage for kind, value in trace.outputs if kind == RELEASED for storage in trace.op[value].holds}
    for index, op in enumerate(trace.ops):
        for made in op.makes:
            if op.fn == "tangent":
                is_released = early and not _is_scalar(op)
                yield op, made, boundary, max(boundary, last[made.name]) if is_released else end
            elif op.is_input:
                yield op, made, 0, update - 1 if op.name == OTHER_FORWARDS else end
            elif made.name in returned:
                yield op, made, index, end
            else:
                yield op, made, index, max(last[made.name], boundary - 1 if made.name in early else 0)


def released(trace: Trace) -> Trace:
    """Return the step of a caller who releases its outputs and tangents; unchanged if all outputs are scalars."""

    def kind_of(kind: str, value: str) -> str:
        return RELEASED if kind == "output" and not _is_scalar(trace.op[value]) else kind

    return replace(trace, outputs=tuple((kind_of(kind, value), value) for kind, value in trace.outputs))


def _is_scalar(op: Op) -> bool:
    return op.type.endswith("[]")


def last_reads(ops: Sequence[Op]) -> dict[str, int]:
    """Map each storage to the index of the last op that makes it or reads a value that holds it."""
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
        source = trace.op[op.reads[0]]
        return source.fn if source.is_input else "activation"
    is_activation = (op.phase == "forward" and crosses) or op.fn == WIDEN
    return "activation" if is_activation else "temporary"
