"""What of the state may live far, as numbers: where in the step it has to be there, and what the update takes for it.

w, 2 MB, read by ops 5, 6 and 90, and by the update   ->   visits (5, 6), (90, 90); rests 0-5, 7-90, 91-
dw, 2 MB, made by op 91, added to by 93               ->   it rests from 94 on, once it has left
s, 4 MB of states                                     ->   it rests throughout
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..analysis.reuse_gaps import ReuseGaps
from ..ir.machine import SMALLEST_STREAMED, Machine


@dataclass(frozen=True, slots=True)
class StateGap:
    """Positions from `first` to before `last` that do without a resident; `visit` is the one at whose end it may be
    fetched again, if there was one before and there is one behind."""

    first: int
    last: int
    next_use: int | None = None


@dataclass(frozen=True, slots=True)
class StateVar:
    """An input that may live far, or a gradient that may leave as soon as the step has made it.

    `visits` are the first and the last position of each stretch of ops that read it; a gradient is not fetched for any,
    and rests behind its last.  `written`: the update sends it back.
    """

    storage: str
    value: str
    nbytes: int
    uses: tuple[tuple[int, int], ...]
    is_gradient: bool
    is_written: bool

    @property
    def is_copied(self) -> bool:
        """Whether copies outside of the update are made of it, if it lives far."""
        return self.is_gradient or bool(self.uses)

    def gaps(self, size: int) -> Iterator[StateGap]:
        """Where in a step of `size` ops it need not be there."""
        begin = 0
        for k, (first, last) in enumerate(self.uses):
            if begin < first and not self.is_gradient:
                yield StateGap(begin, first, k if k else None)
            begin = last + 1
        if begin < size:
            yield StateGap(begin, size)

    def update_us(self, machine: Machine) -> float:
        """How long the links take for it in an update that reads it."""
        return self.nbytes / machine.link.back + (self.nbytes / machine.link.out if self.is_written else 0.0)


def find_state_vars(gaps: ReuseGaps, machine: Machine) -> tuple[StateVar, ...]:
    """What is large enough for a home in the far tier, if there can be any."""
    if not (machine.streaming.enabled and machine.link.works):
        return ()
    places, streamable = _places(gaps), gaps.streamable
    found = []
    for storage, value in streamable.values.items():
        op, nbytes = gaps.trace.op[value], gaps.trace.nbytes[storage]
        if nbytes >= SMALLEST_STREAMED and machine.streaming.can_offload(op.fn):
            made = not op.is_input
            visits = ((gaps.index[value], streamable.last_use[storage]),) if made else _visits(places.get(storage, []))
            found.append(StateVar(storage, value, nbytes, visits, made, op.fn in ("parameter", "state")))
    return tuple(found)


def _places(gaps: ReuseGaps) -> dict[str, list[int]]:
    """Before the update, the ops (by index) that read a value that holds each storage."""
    found: dict[str, list[int]] = {}
    for i, op in enumerate(gaps.trace.ops):
        if op.phase != "update":
            for storage in {held for read in op.reads for held in gaps.trace.op[read].holds}:
                found.setdefault(storage, []).append(i)
    return found


def _visits(places: list[int]) -> tuple[tuple[int, int], ...]:
    """Neighbouring positions put together."""
    found: list[tuple[int, int]] = []
    for place in places:
        if found and found[-1][1] + 1 == place:
            found[-1] = found[-1][0], place
        else:
            found.append((place, place))
    return tuple(found)
