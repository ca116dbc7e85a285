"""Measure steps: the peak memory of each, and its time when it runs in turn with others.

peak(model, batch, step)             # bytes of parameters, buffers and batch, and the peak that a step allocates
in_turn({"eager": a, "ours": b}, 9)  # {"eager": [0.51, ...], "ours": [0.53, ...]}: seconds of nine rounds
Pairs(found["ours"], found["eager"])  # ratio 1.039, middle half 1.021-1.060
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from memgraph.profile.memory_meter import measure_peak, resident_bytes

Step = Callable[[], object]  # forward and backward


def step_of(model: nn.Module, loss: Callable[[], Tensor]) -> Step:
    """Return a function that runs forward and backward with new gradients."""

    def step() -> None:
        model.zero_grad(set_to_none=True)
        loss().backward()

    return step


def peak(model: nn.Module, batch: Iterable[Tensor], step: Step) -> int:
    """Return the peak memory of a step, with parameters, buffers and batch."""
    model.zero_grad(set_to_none=True)
    gc.collect()
    _, allocation = measure_peak(step)
    if allocation is None:
        raise RuntimeError("a step can't be measured while another profiler runs")
    return resident_bytes([*model.parameters(), *model.buffers(), *batch]) + allocation.peak


def seconds_of(step: Step) -> float:
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def loop_text() -> str:
    """Say how fast this machine is now: absolute times of different days can be compared by it."""
    begin = time.process_time()
    total = 0
    for i in range(10_000_000):
        total += i * i % 7
    return f"a Python loop of 10 million steps takes {time.process_time() - begin:.2f} s"


def in_turn(
    steps: Mapping[str, Step], rounds: int, warm: int = 1, timed: Callable[[Step], float] = seconds_of
) -> dict[str, list[float]]:
    """Return the seconds of each step, round by round.

    Each round begins with another step. The first `warm` rounds are not counted.
    """
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
    """Return the ends of the middle half, with the median between them."""
    several = list(values)
    if len(several) == 1:
        return several[0], several[0], several[0]
    low, median, high = statistics.quantiles(several, n=4, method="inclusive")
    return low, median, high


@dataclass(frozen=True)
class Pairs:
    """The seconds of two steps that ran in turn, a pair for each round.

    Ratios are taken within a pair, because other work on the machine slows both of its steps.
    """

    ours: Sequence[float]
    theirs: Sequence[float]

    @property
    def ratios(self) -> list[float]:
        return [ours / theirs for ours, theirs in zip(self.ours, self.theirs, strict=True)]

    @property
    def ratio(self) -> float:
        """The median of the ratios."""
        return middle(self.ratios)[1]

    @property
    def ratio_text(self) -> str:
        """The median of the ratios, as tables print it."""
        return f"{self.ratio:.3f}"

    @property
    def spread_text(self) -> str:
        """The middle half of the ratios, as tables print it."""
        low, _, high = middle(self.ratios)
        return f"{low:.3f}-{high:.3f}"


def ms_text(seconds: Iterable[float]) -> str:
    """Format seconds as milliseconds: the median, and the middle half."""
    low, median, high = (1e3 * value for value in middle(seconds))
    return f"{median:.1f} ({low:.1f}-{high:.1f})"
