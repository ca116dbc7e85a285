"""Two sides of a benchmark run in turn, and are compared pair by pair."""

from __future__ import annotations

import os

import pytest

from benchmarks.clock import Pairs, in_turn
from benchmarks.sides import Side


def test_steps_alternate_and_each_round_begins_with_another() -> None:
    order: list[str] = []
    steps = {"eager": lambda: order.append("eager"), "ours": lambda: order.append("ours")}
    taken = in_turn(steps, 2, warm=1, timed=lambda step: float(step() is None))
    assert order == ["ours", "eager", "eager", "ours", "ours", "eager"]
    assert taken == {"eager": [1.0, 1.0], "ours": [1.0, 1.0]}


def test_a_machine_that_slows_down_changes_no_ratio() -> None:
    pairs = Pairs(ours=[1.1, 2.2, 4.4], theirs=[1.0, 2.0, 4.0])
    assert (pairs.ratio_text, pairs.spread_text) == ("1.100", "1.100-1.100")


class Counter:
    """Counts, wherever it lives."""

    def __init__(self, start: int) -> None:
        self.now = start

    def add(self, number: int) -> tuple[int, int]:
        self.now += number
        return self.now, os.getpid()

    def fail(self) -> None:
        raise ValueError(f"at {self.now}")


@pytest.mark.long
def test_a_side_lives_in_a_process_of_its_own_and_its_errors_come_back() -> None:
    with Side(Counter, 3) as side:
        (four, there), (six, again) = side.do("add", 1), side.do("add", 2)
        assert (four, six) == (4, 6) and there == again != os.getpid()
        with pytest.raises(ValueError, match="at 6"):
            side.do("fail")
        assert side.do("add", 1)[0] == 7
