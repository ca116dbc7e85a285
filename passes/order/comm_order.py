"""Start the collective of a bucket as soon as its last gradient is made, while backward runs.

    dv = mm(x, d)                                dv = mm(x, d)
    db = sum(d)                                  db = sum(d)
    dw = mm(y, p)                                a = pack(dv, db)              # frees dv and db
    a = pack(dv, db)                             a_part = reduce_scatter(a)    # begins
    a_part = reduce_scatter(a)            ->     dw = mm(y, p)
    a_shard = reduced(a_part, a)                 a_shard = reduced(a_part, a)  # has ended: frees a
    b = stretch(dw)                              b = stretch(dw)
    b_part = reduce_scatter(b)                   b_part = reduce_scatter(b)
    b_shard = reduced(b_part, b)                 b_shard = reduced(b_part, b)  # frees dw

A collective is waited for before the next one begins.  So only the buckets of one op are in memory, one of them packed,
and never the whole set of gradients.  The order depends on the step alone, so it is the same on all ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..ir.ops import GATHER, PACK, PACK_PART, REDUCE_SCATTER, REDUCED
from ..ir.trace import Op, Trace
from .gathers import place_gathers


@dataclass(frozen=True, slots=True)
class CollectivePlace:
    """The ops that begin a collective (they pack the bucket and send it), and those that wait and unpack."""

    begins: tuple[Op, ...]
    ends: tuple[Op, ...]

    @property
    def packs(self) -> bool:
        return self.begins[0].fn == PACK


def place_collectives(trace: Trace, at_once: bool = False) -> Trace:
    """Return the step with each collective begun as early as possible, and ended before the next.

    With `at_once` it ends at once, where nothing overlaps it.  Gathers are placed by `passes/order/gathers.py`.  All
    other ops stay in order.
    """
    trace = place_gathers(trace, at_once)
    places = _places(trace)
    if not places:
        return trace
    moved = {op.name for place in places for op in (*place.begins, *place.ends)}
    parts = [op for op in trace.ops if op.fn == PACK_PART]
    rest = [op for op in trace.ops if op.name not in moved and op.fn != PACK_PART]
    made = {op.name: i for i, op in enumerate(rest)}
    made |= {op.name: made[op.reads[0]] for op in parts}
    last = max(i for i, op in enumerate(rest) if op.phase != "update")
    first = next((i for i, op in enumerate(rest) if op.phase == "backward"), last + 1) - 1
    behind: dict[int, list[Op | CollectivePlace]] = defaultdict(list)
    for part in parts:
        behind[max(first, made[part.name])].append(part)
    for place in places:
        behind[max(first, *(made[read] for read in place.begins[0].reads))].append(place)
    return replace(trace, ops=_written(rest, behind, last, at_once))


def sequence(trace: Trace) -> str:
    """Describe the collectives in order: it has to be the same on all ranks."""
    collectives = (op for op in trace.ops if op.fn in (REDUCE_SCATTER, GATHER))
    return "\n".join(f"{op.name} {op.type} of {trace.op[op.reads[0]].type}" for op in collectives)


def _written(
    rest: Sequence[Op], behind: dict[int, list[Op | CollectivePlace]], last: int, at_once: bool
) -> tuple[Op, ...]:
    """Return the ops, each with the collectives behind it, and with their ends."""
    lines: list[Op] = []
    pending: list[tuple[int, CollectivePlace]] = []
    for i, op in enumerate(rest):
        lines.append(op)
        for new in behind[i]:
            if isinstance(new, Op):
                lines.append(new)
                continue
            ended = [each for each in pending if at_once or each[0] < i or (new.packs and each[1].packs)]
            pending = [*(each for each in pending if each not in ended), (i, new)]
            lines += [*(end for _, place in ended for end in place.ends), *new.begins]
        if i == last or (at_once and pending):
            lines += [end for _, place in pending for end in place.ends]
            pending = []
    return tuple(lines)


def _places(trace: Trace) -> list[CollectivePlace]:
    ends: dict[str, list[Op]] = defaultdict(list)
    source: dict[str, str] = {}  # the collective that each value comes from
    for op in trace.ops:
        if op.fn == REDUCED:
            source[op.name] = op.reads[0]
        elif op.phase == "backward" and (sources := [source[read] for read in op.reads if read in source]):
            source[op.name] = sources[0]
        if op.name in source:
            ends[source[op.name]].append(op)
    begins = [op for op in trace.ops if op.fn == REDUCE_SCATTER]
    return [CollectivePlace((*(trace.op[read] for read in op.reads), op), tuple(ends[op.name])) for op in begins]
