"""Parameters, gradients and optimizer states as numbers: where a step uses them, and where they may be offloaded.

w, 2 MB, read by ops 5, 6 and 90, and by the update   ->   uses (5, 6), (90, 90); gaps 0-5, 7-90, 91-
dw, 2 MB, made by op 91, added to by 93               ->   a gap from 94 on
s, 4 MB of optimizer states                           ->   a gap throughout
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..analysis.reuse_gaps import ReuseGaps
from ..ir.machine import SMALLEST_STREAMED, Machine


@dataclass(frozen=True, slots=True)
class StateGap:
    """Positions from `first` to before `last` that do not use a state; `next_use` is None before the first use and
    behind the last."""

    first: int
    last: int
    next_use: int | None = None


@dataclass(frozen=True, slots=True)
class StateVar:
    """An input that may be offloaded throughout, or a gradient that may be offloaded once it is complete.

    Attributes:
        uses: the first and the last position of each stretch of ops that read it; of a gradient, that make it.
        is_written: True if the update writes it back.
    """

    storage: str
    value: str
    nbytes: int
    uses: tuple[tuple[int, int], ...]
    is_gradient: bool
    is_written: bool

    @property
    def is_copied(self) -> bool:
        """Return True if it is copied outside of the update once it is offloaded."""
        return self.is_gradient or bool(self.uses)

    def gaps(self, size: int) -> Iterator[StateGap]:
        """Yield where a step of `size` ops does not use it."""
        start = 0
        for k, (first, last) in enumerate(self.uses):
            if start < first and not self.is_gradient:
                yield StateGap(start, first, k if k else None)
            start = last + 1
        if start < size:
            yield StateGap(start, size)

    def update_us(self, machine: Machine) -> float:
        """Return the microseconds that the links take for it in an update that reads it."""
        return self.nbytes / machine.link.back + (self.nbytes / machine.link.out if self.is_written else 0.0)


def find_state_vars(gaps: ReuseGaps, machine: Machine) -> tuple[StateVar, ...]:
    """Return the parameters, gradients and states that may be offloaded; none if the machine can't."""
    if not (machine.streaming.enabled and machine.link.works):
        return ()
    reads, streamable = _reads(gaps), gaps.streamable
    states = []
    for storage, value in streamable.values.items():
        op, nbytes = gaps.trace.op[value], gaps.trace.nbytes[storage]
        if nbytes >= SMALLEST_STREAMED and machine.streaming.can_offload(op.fn):
            if op.is_input:
                uses = _stretches(reads.get(storage, []))
            else:
                uses = ((gaps.trace.index[value], streamable.last_use[storage]),)
            is_written = op.fn in ("parameter", "state")
            states.append(StateVar(storage, value, nbytes, uses, not op.is_input, is_written))
    return tuple(states)


def _reads(gaps: ReuseGaps) -> dict[str, list[int]]:
    """Return the positions, updates left out, that read each storage."""
    reads: dict[str, list[int]] = {}
    for position, op in enumerate(gaps.trace.ops):
        if op.phase != "update":
            for storage in gaps.trace.held_by(op.reads):
                reads.setdefault(storage, []).append(position)
    return reads


def _stretches(positions: list[int]) -> tuple[tuple[int, int], ...]:
    """Join neighbouring positions."""
    stretches: list[tuple[int, int]] = []
    for position in positions:
        if stretches and stretches[-1][1] + 1 == position:
            stretches[-1] = stretches[-1][0], position
        else:
            stretches.append((position, position))
    return tuple(stretches)
