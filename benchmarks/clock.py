"""Steps in one process, side by side: the bytes that each takes, and its time in turn with the others.

peak(model, batch, step)             # parameters, buffers and batch, and the most that a step allocates above them
in_turn({"eager": a, "ours": b}, 9)  # {"eager": [0.51, ...], "ours": [0.53, ...]}: seconds of nine rounds
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable

from torch import Tensor, nn

from memgraph.peak import measured, resident_bytes

Step = Callable[[], object]  # forward and backward


def step_of(model: nn.Module, loss: Callable[[], Tensor]) -> Step:
    """Forward and backward, with gradients made anew."""

    def step() -> None:
        model.zero_grad(set_to_none=True)
        loss().backward()

    return step


def peak(model: nn.Module, batch: Iterable[Tensor], step: Step) -> int:
    """The most that lies there during a step."""
    model.zero_grad(set_to_none=True)
    gc.collect()
    _, allocation = measured(step)
    if allocation is None:
        raise RuntimeError("a step can't be measured while another profiler runs")
    return resident_bytes([*model.parameters(), *model.buffers(), *batch]) + allocation.peak


def seconds_of(step: Step) -> float:
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def in_turn(
    steps: dict[str, Step], rounds: int, warm: int = 1, timed: Callable[[Step], float] = seconds_of
) -> dict[str, list[float]]:
    """The seconds of every step in every round; each round begins with another of them, and the first only warm up."""
    names = list(steps)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(-warm, rounds):
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            seconds = timed(steps[name])
            if turn >= 0:
                taken[name].append(seconds)
    return taken


def middle(values: Iterable[float]) -> tuple[float, float, float]:
    """The median between the ends of the middle half; a single value is all three."""
    several = list(values)
    if len(several) == 1:
        return several[0], several[0], several[0]
    low, median, high = statistics.quantiles(several, n=4, method="inclusive")
    return low, median, high
