"""Let what other ranks have updated of the parameters come while forward goes on, each waited for at its first use.

    w_sent = gather(w)                           v_sent = gather(v)      # both begin
    w_here = gathered(w_sent, w)                 w_sent = gather(w)
    v_sent = gather(v)                           v_here = gathered(v_sent, v)
    v_here = gathered(v_sent, v)         ->      a = mm(x, v)
    a = mm(x, v)                                 b = relu(a)
    b = relu(a)                                  w_here = gathered(w_sent, w)
    c = mm(b, w)                                 c = mm(b, w)

They begin in the order of first use, and come one after the other.  What has to be packed takes room until it has
come, so of that no more than two are under way: the next begins when the one two before has ended, and nothing
overtakes it.  Where nothing hides an exchange, what takes room begins where it is waited for; what takes none begins
early there, too, so that no rank waits for one that is behind.  The order depends on the step alone, and is therefore
the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..ir.ops import GATHER, GATHER_ROOM, GATHERED, gathered_by
from ..ir.trace import Op, Trace

AHEAD = 2  # of those that take room


@dataclass(frozen=True, slots=True)
class GatherPlace:
    """What begins it: the op that stands for its room, if it takes some, and the one that sends; the one that waits;
    and the op (by index) before which it has to have come."""

    begins: tuple[Op, ...]
    end: Op
    use: int

    @property
    def packs(self) -> bool:
        return len(self.begins) > 1


def place_gathers(trace: Trace, at_once: bool = False) -> Trace:
    """The step with each gather begun early and ended at its first use; all of one that takes room stands there
    `at_once`, if nothing hides it; all other ops stay in order."""
    if all(op.fn != GATHER for op in trace.ops):
        return trace
    mine = {name for op in trace.ops if op.fn == GATHERED for name in (op.name, *_begins(trace, op))}
    rest = [op for op in trace.ops if op.name not in mine]
    gathers = _gathers(trace, rest)
    first = next((i for i, op in enumerate(rest) if not op.is_input), len(rest))
    behind, begin = _behind(gathers, at_once), list[int]()
    for one, before in zip(gathers, behind, strict=True):
        earliest = gathers[before].use if before >= 0 else first
        begin.append(one.use if at_once and one.packs else max([earliest, *begin[-1:]]))
    lines: list[Op] = []
    ended = 0  # of the gathers, which end in order
    for i in range(len(rest) + 1):
        for k in (k for k, at in enumerate(begin) if at == i):
            lines += [one.end for one in gathers[ended : behind[k] + 1]]
            ended = max(ended, behind[k] + 1)
            lines += gathers[k].begins
        due = sum(one.use <= i for one in gathers)
        lines += [one.end for one in gathers[ended:due]]
        ended = max(ended, due)
        lines += rest[i : i + 1]
    return replace(trace, ops=tuple(lines))


def _begins(trace: Trace, end: Op) -> tuple[str, ...]:
    """The ops that begin what `end` waits for."""
    rooms = (read for read in end.reads[1:] if trace.op[read].fn == GATHER_ROOM)
    return (*rooms, end.reads[0])


def _gathers(trace: Trace, rest: Sequence[Op]) -> list[GatherPlace]:
    """All of them, in the order of first use."""
    turn = next((i for i, op in enumerate(rest) if not op.is_input and op.phase != "forward"), len(rest))
    used: dict[str, int] = {}
    for i, op in enumerate(rest[:turn]):
        for read in op.reads:
            for held in trace.op[read].holds:
                used.setdefault(held, i)
    found = []
    for name, storages in gathered_by(trace).items():
        end = trace.op[name]
        begins = tuple(trace.op[begin] for begin in _begins(trace, end))
        found.append(GatherPlace(begins, end, min((used.get(held, turn) for held in storages), default=turn)))
    return sorted(found, key=lambda one: one.use)


def _behind(gathers: Sequence[GatherPlace], at_once: bool) -> list[int]:
    """For each the last one that has to have ended before it begins, or -1."""
    found, packed, ahead = list[int](), list[int](), 1 if at_once else AHEAD
    for k, one in enumerate(gathers):
        found.append(packed[-ahead] if one.packs and len(packed) >= ahead else -1)
        packed += [k] * one.packs
    return found
