"""Let ranks exchange the gradients of a bucket as soon as the last of them is made, while backward goes on.

    dv = mm(x, d)                                dv = mm(x, d)
    db = sum(d)                                  db = sum(d)
    dw = mm(y, p)                                a = pack(dv, db)              # dv's and db's bytes go here
    a = pack(dv, db)                             a_part = reduce_scatter(a)    # begins
    a_part = reduce_scatter(a)            ->     dw = mm(y, p)
    a_shard = reduced(a_part, a)                 a_shard = reduced(a_part, a)  # has ended: a's bytes go
    b = stretch(dw)                              b = stretch(dw)
    b_part = reduce_scatter(b)                   b_part = reduce_scatter(b)
    b_shard = reduced(b_part, b)                 b_shard = reduced(b_part, b)  # dw's bytes go

Exchanges are waited for before the next gradient's begin: so there are never more in memory than those of one op, one
of them packed, and the whole set of gradients is at no time.  The order depends on the step alone, and is therefore the
same on all ranks.
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
    """What begins it: the ops that lay out what is sent, and that which sends it; and what ends it: the op that waits,
    and those that take what has come."""

    begins: tuple[Op, ...]
    ends: tuple[Op, ...]

    @property
    def packs(self) -> bool:
        return self.begins[0].fn == PACK


def place_collectives(trace: Trace, at_once: bool = False) -> Trace:
    """The step with each exchange as early as it may begin, and ended before the next, or at once if nothing hides it;
    gathers stand where `passes/order/gathers.py` says, and all other ops stay in order."""
    trace = place_gathers(trace, at_once)
    exchanges = _exchanges(trace)
    if not exchanges:
        return trace
    mine = {op.name for one in exchanges for op in (*one.begins, *one.ends)}
    cut = [op for op in trace.ops if op.fn == PACK_PART]
    rest = [op for op in trace.ops if op.name not in mine and op.fn != PACK_PART]
    made = {op.name: i for i, op in enumerate(rest)}
    made |= {op.name: made[op.reads[0]] for op in cut}
    last = max(i for i, op in enumerate(rest) if op.phase != "update")
    first = next((i for i, op in enumerate(rest) if op.phase == "backward"), last + 1) - 1
    behind: dict[int, list[Op | CollectivePlace]] = defaultdict(list)
    for piece in cut:
        behind[max(first, made[piece.name])].append(piece)
    for one in exchanges:
        behind[max(first, *(made[read] for read in one.begins[0].reads))].append(one)
    return replace(trace, ops=_written(rest, behind, last, at_once))


def sequence(trace: Trace) -> str:
    """What ranks exchange in which order: it has to be the same on all of them."""
    begun = (op for op in trace.ops if op.fn in (REDUCE_SCATTER, GATHER))
    return "\n".join(f"{op.name} {op.type} of {trace.op[op.reads[0]].type}" for op in begun)


def _written(
    rest: Sequence[Op], behind: dict[int, list[Op | CollectivePlace]], last: int, at_once: bool
) -> tuple[Op, ...]:
    """The ops with what stands behind each of them, and with the ends of exchanges."""
    lines: list[Op] = []
    under_way: list[tuple[int, CollectivePlace]] = []
    for i, op in enumerate(rest):
        lines.append(op)
        for new in behind[i]:
            if isinstance(new, Op):
                lines.append(new)
                continue
            over = [one for one in under_way if at_once or one[0] < i or (new.packs and one[1].packs)]
            under_way = [*(one for one in under_way if one not in over), (i, new)]
            lines += [*(end for _, one in over for end in one.ends), *new.begins]
        if i == last or (at_once and under_way):
            lines += [end for _, one in under_way for end in one.ends]
            under_way = []
    return tuple(lines)


def _exchanges(trace: Trace) -> list[CollectivePlace]:
    ends: dict[str, list[Op]] = defaultdict(list)
    of: dict[str, str] = {}  # the op that began the exchange of which each value comes
    for op in trace.ops:
        if op.fn == REDUCED:
            of[op.name] = op.reads[0]
        elif op.phase == "backward" and (come := [of[read] for read in op.reads if read in of]):
            of[op.name] = come[0]
        if op.name in of:
            ends[of[op.name]].append(op)
    begins = [op for op in trace.ops if op.fn == REDUCE_SCATTER]
    return [CollectivePlace((*(trace.op[read] for read in op.reads), op), tuple(ends[op.name])) for op in begins]
