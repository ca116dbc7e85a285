"""When the latest steps of a plan call for another look at it."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time

import pytest
import torch

from memgraph.profile import step_timer
from memgraph.profile.step_timer import WallTimes
from memgraph.report.step_times import FEW, LENGTH
from memgraph.runtime.step_history import LOOKS, StepHistory
from memgraph.system import reference_op

CPU = torch.device("cpu")


def wall(us: float) -> WallTimes:
    found = WallTimes(CPU)
    found.spans.append((0.0, us / 1e6))
    return found


def steps(us: float, count: int = LENGTH) -> StepHistory:
    recent = StepHistory()
    for _ in range(count):
        recent.add(wall(us))
    return recent


def test_three_steps_have_a_median() -> None:
    assert steps(100.0, FEW - 1).median_us is None
    assert steps(100.0, FEW).median_us == steps(100.0).median_us == pytest.approx(100.0)


def test_the_reference_op_is_timed_where_steps_are_off_their_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[float] = []

    def slower() -> float:
        timed.append(0.25)
        return 0.25

    monkeypatch.setattr(reference_op, "slower", slower)
    recent = StepHistory()
    for _ in range(2 * LENGTH):
        recent.add(wall(120.0))
        recent.compare(100.0)
    assert recent.slower == 0.25 and len(timed) == 3  # behind three steps, and at each full length
    assert steps(120.0, FEW).slower is None
    recent.compare(120.0)
    assert recent.slower is None and len(timed) == 3


def test_a_reference_op_that_shares_its_cores_is_slower() -> None:
    assert reference_op.least_us() == reference_op.least_us() > 0
    busy = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4 * len(os.sched_getaffinity(0)))
    ]
    try:
        time.sleep(0.3)
        assert reference_op.slower() > 0.1
    finally:
        for process in busy:
            process.kill()
            process.wait()


def test_a_few_slow_steps_change_nothing() -> None:
    recent = steps(100.0)
    for _ in range(LENGTH // 4):
        recent.add(wall(900.0))
    assert recent.median_us == pytest.approx(100.0)


def test_it_is_judged_once_a_window() -> None:
    recent = StepHistory()
    judged = [recent.add(wall(1.0)) for _ in range(3 * LENGTH)]
    assert [place for place, due in enumerate(judged, 1) if due] == [LENGTH, 2 * LENGTH, 3 * LENGTH]


@pytest.mark.parametrize(
    ("forecast", "looked", "plain", "search", "due"),
    [
        (100.0, 100.0, 90.0, 1.0, True),  # 120 is neither what was forecast nor what it took when it was looked at
        (115.0, 100.0, 90.0, 1.0, False),  # it takes what was forecast
        (100.0, 118.0, 90.0, 1.0, False),  # it was looked at with these times already
        (100.0, 100.0, 90.0, 30.0 * LENGTH, True),  # the search takes what has been lost
        (100.0, 100.0, 90.0, 31.0 * LENGTH, False),  # it takes more
        (100.0, 100.0, 130.0, 1.0, False),  # no plan is faster than the step as it is
    ],
)
def test_a_look_is_called_for_where_it_may_pay(
    forecast: float, looked: float, plain: float, search: float, due: bool
) -> None:
    recent = steps(120.0)
    assert recent.calls_for_look(forecast, looked, plain, search - 1e-6) is due


def test_looks_are_few() -> None:
    recent = StepHistory()
    for _ in range(LOOKS):
        for _ in range(LENGTH):
            recent.add(wall(500.0))
        assert recent.calls_for_look(100.0, 100.0, 0.0, 0.0)
        recent = recent.after_look()
    for _ in range(LENGTH):
        recent.add(wall(500.0))
    assert not recent.calls_for_look(100.0, 100.0, 0.0, 0.0)


def test_halves_are_timed_without_what_lies_between(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.chain([0.0, 1.0, 5.0, 7.0])
    monkeypatch.setattr(step_timer, "now", lambda device: next(ticks))
    whole = WallTimes(CPU)
    for _ in range(2):
        with whole:
            pass
    assert whole.us == pytest.approx(3e6)
