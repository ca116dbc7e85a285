"""When each rank runs what, from the order of its actions and the times of its stages.

rank 0: F0 F1 B0 B1        F takes 1, B 2        rank 0:  F0 F1 .  .  B0 B0 B1 B1
rank 1: F0 B0 F1 B1                     ->       rank 1:  .  F0 B0 B0 F1 B1 B1

Forward waits for the stage before, backward for the stage behind.  What a backward recomputes before it reads a
gradient does not wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .action import BACKWARD, FORWARD, WEIGHTS, Action


class StageTimes(NamedTuple):
    """Times of one micro-batch in a stage, in microseconds.

    Attributes:
        forward, backward, weights: of each kind of action.
        recompute: the part of backward that runs before a gradient is read.
        sent_forward, sent_backward: until what it sends to the next stage, or to the one before, has come.
    """

    forward: float
    backward: float
    weights: float = 0.0
    recompute: float = 0.0
    sent_forward: float = 0.0
    sent_backward: float = 0.0

    @property
    def busy(self) -> float:
        """Return how long the rank computes."""
        return self.forward + self.backward + self.weights


@dataclass(frozen=True, eq=False)
class Timeline:
    """The times of a mini-batch, in microseconds.

    Attributes:
        begins: when each action of each rank begins.
        ends: when each rank has ended.
        busy: how long each rank computes.
        hidden: how long each rank recomputes while it would wait for a gradient.
    """

    begins: tuple[list[float], ...]
    ends: tuple[float, ...]
    busy: tuple[float, ...]
    hidden: tuple[float, ...]

    @property
    def us(self) -> float:
        """Return the time of the mini-batch."""
        return max(self.ends)

    @property
    def bubble(self) -> float:
        """Return the share of the ranks' time in which they wait."""
        return 1 - sum(self.busy) / (len(self.busy) * self.us) if self.us else 0.0


def simulate(actions: Sequence[Sequence[Action]], times: Sequence[StageTimes]) -> Timeline:
    """Return when each action runs.

    Raises:
        ValueError: the ranks wait for each other.
    """
    ranks, stages = len(actions), len(times)
    chunks = 1 + max((action.chunk for action in actions[0]), default=-1)
    forward = [[-1.0] * chunks for _ in range(stages)]  # when it has ended
    backward = [[-1.0] * chunks for _ in range(stages)]
    begins: tuple[list[float], ...] = tuple([] for _ in range(ranks))
    free, busy, hidden = [0.0] * ranks, [0.0] * ranks, [0.0] * ranks
    waiting: dict[tuple[int, int, bool], int] = {}  # the rank that waits for a forward, or a backward
    ready = list(range(ranks))
    while ready:
        rank = ready.pop()
        mine, order, now = begins[rank], actions[rank], free[rank]
        for at in range(len(mine), len(order)):
            kind, stage, chunk = order[at]
            time, comes, recompute = times[stage], 0.0, 0.0
            if kind == FORWARD:
                if stage and (comes := forward[stage - 1][chunk]) < 0:
                    waiting[stage - 1, chunk, True] = rank
                    break
                took = time.forward
            elif kind == BACKWARD:
                if stage + 1 < stages and (comes := backward[stage + 1][chunk]) < 0:
                    waiting[stage + 1, chunk, False] = rank
                    break
                took, recompute = time.backward, time.recompute
            else:
                took = time.weights
            begin = max(now, comes - recompute)
            hidden[rank] += max(0.0, min(comes - now, recompute))
            mine.append(begin)
            now = begin + took
            busy[rank] += took
            if kind != WEIGHTS:
                if kind == FORWARD:
                    forward[stage][chunk] = now + time.sent_forward
                else:
                    backward[stage][chunk] = now + time.sent_backward
                if (other := waiting.pop((stage, chunk, kind == FORWARD), None)) is not None:
                    ready.append(other)
        free[rank] = now
    if any(len(mine) < len(order) for mine, order in zip(begins, actions, strict=True)):
        raise ValueError("the ranks wait for each other in this order of actions")
    return Timeline(begins, tuple(free), tuple(busy), tuple(hidden))
