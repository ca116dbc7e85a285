"""The order in which each rank runs forward and backward of the micro-batches of its stages.

    2 ranks, 3 micro-batches            rank 0                               rank 1
    gpipe                               F0 F1 F2 B0 B1 B2                    F0 F1 F2 B0 B1 B2
    1f1b                                F0 F1 B0 F2 B1 B2                    F0 B0 F1 B1 F2 B2
    zero_bubble                         F0 F1 B0 W0 F2 B1 W1 B2 W2           F0 B0 F1 B1 W0 F2 B2 W1 W2
    interleaved, 2 stages a rank        F0 F1 F0' F1' B0' F2 B1' ...         stage 0 and stage 2, which is F'

With zero_bubble backward is in two: B for what is sent, W for gradients of parameters.  Rank k runs W k micro-batches
after B, in what would be its bubble.  Sources: GPipe (1811.06965), PipeDream-Flush (2006.09503), Megatron-LM
(2104.04473), ZB-H1 (2401.10241).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from .action import BACKWARD, FORWARD, WEIGHTS, Action
from .timeline import StageTimes, Timeline, simulate

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero_bubble")
NO_GRADIENTS = "forward only"


class Moment(NamedTuple):
    """An action of a rank, while so many forwards of each of its stages are open, that of the action included."""

    kind: str
    stage: int
    open: tuple[int, ...]


@dataclass(frozen=True)
class PipelineSchedule:
    """The order of the actions of all ranks; stage k is on rank k % ranks.

    Attributes:
        delay: of zero_bubble: the most micro-batches between a backward and its weights. 0 is the memory of 1f1b.
        runs_ahead: a rank goes on while its newest message waits, and does not keep step with its receivers.
    """

    name: str
    ranks: int
    chunks: int
    stages_per_rank: int = 1
    delay: int = 1 << 30
    runs_ahead: bool = True

    @property
    def stages(self) -> int:
        return self.ranks * self.stages_per_rank

    def stages_of(self, rank: int) -> range:
        """Return the stages of a rank."""
        return range(rank, self.stages, self.ranks)

    @cached_property
    def actions(self) -> tuple[tuple[Action, ...], ...]:
        """Return the actions of each rank, in their order."""
        return tuple(tuple(self._of(rank)) for rank in range(self.ranks))

    @cached_property
    def last_kind(self) -> str:
        """Return the kind of the action that ends a micro-batch."""
        return {NO_GRADIENTS: FORWARD, "zero_bubble": WEIGHTS}.get(self.name, BACKWARD)

    def open_forwards(self, stage: int) -> int:
        """Return the most forwards of a stage that are open at once."""
        return max(1, self._most_between(stage, FORWARD))

    def pending_weights(self, stage: int) -> int:
        """Return the most micro-batches that wait for the gradients of parameters while another one runs."""
        return max(0, self._most_between(stage, BACKWARD) - 1) if self.name == "zero_bubble" else 0

    def moments(self, rank: int) -> frozenset[Moment]:
        """Return all that a rank does, with the forwards that are open meanwhile."""
        stages, moments = self.stages_of(rank), set[Moment]()
        count = dict.fromkeys(stages, 0)
        for kind, stage, _ in self.actions[rank]:
            count[stage] += kind == FORWARD
            moments.add(Moment(kind, stage, tuple(count.values())))
            count[stage] -= kind == self.last_kind
        return frozenset(moments)

    def timeline(self, times: Sequence[StageTimes]) -> Timeline:
        """Return when each action runs, with these times of each stage."""
        return simulate(self.actions, times)

    def still_unread(self, receiver: int, chunks: Sequence[int], at: Action) -> list[int]:
        """Return the chunks whose message to a stage is not waited for before `at`.

        A message has been asked for if its reader comes earlier in one order of all actions: so to wait for it can't
        block.
        """
        newest = chunks[-1:] if self.runs_ahead else ()
        return [c for c in chunks if c in newest or self._key(Action(at.kind, receiver, c)) >= self._key(at)]

    def unread(self, kind: str, sender: int, receiver: int) -> int:
        """Return the most messages from one stage to another that lie there at once, the newest included."""
        most, waiting = 0, list[int]()
        for action in self.actions[sender % self.ranks]:
            if (action.kind, action.stage) == (kind, sender):
                waiting = [*self.still_unread(receiver, waiting, action), action.chunk]
                most = max(most, len(waiting))
        return most

    def _most_between(self, stage: int, first: str) -> int:
        most = count = 0
        for action in self.actions[stage % self.ranks]:
            if action.stage == stage:
                count += (action.kind == first) - (action.kind == self.last_kind)
                most = max(most, count)
        return most

    @cached_property
    def _begins(self) -> dict[Action, float]:
        """Map each action to when it begins, if forward takes one unit, and backward two in all."""
        weights = 1.0 if self.name == "zero_bubble" else 0.0
        begins = self.timeline([StageTimes(1.0, 2.0 - weights, weights)] * self.stages).begins
        return {
            action: at
            for actions, times in zip(self.actions, begins, strict=True)
            for action, at in zip(actions, times, strict=True)
        }

    def _key(self, action: Action) -> tuple[float, int]:
        return self._begins[action], -action.stage

    def _of(self, rank: int) -> Iterator[Action]:
        if self.name in ("interleaved", NO_GRADIENTS):
            return self._interleaved(rank)
        if self.name == "zero_bubble":
            return self._weights_late(rank)
        return self._one_stage(rank)

    def _one_stage(self, rank: int) -> Iterator[Action]:
        """Yield the actions of a rank with one stage."""
        first = self.chunks if self.name == "gpipe" else min(self.chunks, self.ranks - rank)
        yield from (Action(FORWARD, rank, i) for i in range(first))
        for i in range(self.chunks):
            yield Action(BACKWARD, rank, i)
            if first + i < self.chunks:
                yield Action(FORWARD, rank, first + i)

    def _weights_late(self, rank: int) -> Iterator[Action]:
        delay = min(rank, self.delay)
        for action in self._one_stage(rank):
            yield action
            if action.kind == BACKWARD and action.chunk >= delay:
                yield Action(WEIGHTS, rank, action.chunk - delay)
        yield from (Action(WEIGHTS, rank, i) for i in range(max(0, self.chunks - delay), self.chunks))

    def _interleaved(self, rank: int) -> Iterator[Action]:
        """Yield the actions of a rank with several stages: as many micro-batches as there are ranks, stage by stage.

        An incomplete group is run as a complete one, without those that are not there.
        """
        stages = self.stages_of(rank)
        groups = [range(i, i + self.ranks) for i in range(0, self.chunks, self.ranks)]
        forwards = [Action(FORWARD, stage, i) for group in groups for stage in stages for i in group]
        backwards = [Action(BACKWARD, stage, i) for group in groups for stage in reversed(stages) for i in group]
        first = (self.stages_per_rank - 1) * self.ranks + 2 * (self.ranks - 1 - rank) + 1
        order = forwards[:first]
        for i, action in enumerate(backwards):
            order += [action, *forwards[first + i : first + i + 1]]
        kinds = (FORWARD,) if self.name == NO_GRADIENTS else (FORWARD, BACKWARD)
        return (action for action in order if action.chunk < self.chunks and action.kind in kinds)
