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

Gather updated parameters while forward runs, and wait for each at its first use.

    w_sent = gather(w)                           v_sent = gather(v)      # both begin
    w_here = gathered(w_sent, w)                 w_sent = gather(w)
    v_sent = gather(v)                           v_here = gathered(v_sent, v)
    v_here = gathered(v_sent, v)         ->      a = mm(x, v)
    a = mm(x, v)                                 b = relu(a)
    b = relu(a)                                  w_here = gathered(w_sent, w)
    c = mm(b, w)                                 c = mm(b, w)

They begin in the order of first use.  A packed bucket takes a buffer until it has been gathered, so at most two of them
are pending: the next begins when the one two before has ended, and no other overtakes it.  Where nothing overlaps a
collective, packed buckets are gathered at their first use.  The others still begin early, so that no rank waits for a
slower one.  The order depends on the step alone, so it is the same on all ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..ir.ops import GATHER, GATHER_ROOM, GATHERED, PACK, PACK_PART, REDUCE_SCATTER, REDUCED, gathered_by
from ..ir.trace import Op, Trace

AHEAD = 2  # packed buckets that are pending


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

    With `at_once` it ends at once, where nothing overlaps it.  Gathers are placed by `passes/order/comm_order.py`.  All
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


@dataclass(frozen=True, slots=True)
class GatherPlace:
    """The ops that begin a gather (allocate its buffer, if it is packed, and send), the op that waits, and the first op
    (by index) that uses its result."""

    begins: tuple[Op, ...]
    end: Op
    use: int

    @property
    def packs(self) -> bool:
        return len(self.begins) > 1


def place_gathers(trace: Trace, at_once: bool = False) -> Trace:
    """Return the step with each gather begun early, and ended at its first use.

    With `at_once`, packed buckets are gathered at their first use.  All other ops stay in order.
    """
    if all(op.fn != GATHER for op in trace.ops):
        return trace
    moved = {name for op in trace.ops if op.fn == GATHERED for name in (op.name, *_begins(trace, op))}
    rest = [op for op in trace.ops if op.name not in moved]
    gathers = _gathers(trace, rest)
    first = next((i for i, op in enumerate(rest) if not op.is_input), len(rest))
    behind, begin = _behind(gathers, at_once), list[int]()
    for gather, before in zip(gathers, behind, strict=True):
        earliest = gathers[before].use if before >= 0 else first
        begin.append(gather.use if at_once and gather.packs else max([earliest, *begin[-1:]]))
    lines: list[Op] = []
    ended = 0  # of the gathers, which end in order
    for i in range(len(rest) + 1):
        for k in (k for k, at in enumerate(begin) if at == i):
            lines += [gather.end for gather in gathers[ended : behind[k] + 1]]
            ended = max(ended, behind[k] + 1)
            lines += gathers[k].begins
        due = sum(gather.use <= i for gather in gathers)
        lines += [gather.end for gather in gathers[ended:due]]
        ended = max(ended, due)
        lines += rest[i : i + 1]
    return replace(trace, ops=tuple(lines))


def _begins(trace: Trace, end: Op) -> tuple[str, ...]:
    """Return the ops that begin the gather that `end` waits for."""
    rooms = (read for read in end.reads[1:] if trace.op[read].fn == GATHER_ROOM)
    return (*rooms, end.reads[0])


def _gathers(trace: Trace, rest: Sequence[Op]) -> list[GatherPlace]:
    """Return all gathers, in the order of first use."""
    boundary = next((i for i, op in enumerate(rest) if not op.is_input and op.phase != "forward"), len(rest))
    used: dict[str, int] = {}
    for i, op in enumerate(rest[:boundary]):
        for read in op.reads:
            for held in trace.op[read].holds:
                used.setdefault(held, i)
    gathers = []
    for name, storages in gathered_by(trace).items():
        end = trace.op[name]
        begins = tuple(trace.op[begin] for begin in _begins(trace, end))
        gathers.append(GatherPlace(begins, end, min((used.get(held, boundary) for held in storages), default=boundary)))
    return sorted(gathers, key=lambda gather: gather.use)


def _behind(gathers: Sequence[GatherPlace], at_once: bool) -> list[int]:
    """Return, for each gather, the last one that has to end before it begins, or -1."""
    before, packed, ahead = list[int](), list[int](), 1 if at_once else AHEAD
    for k, gather in enumerate(gathers):
        before.append(packed[-ahead] if gather.packs and len(packed) >= ahead else -1)
        packed += [k] * gather.packs
    return before
