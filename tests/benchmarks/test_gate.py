"""The planner is as good as it was: kept plans have their kept forecasts, and new plans are no worse.

`python -m benchmarks.gate --rewrite` prints what a change of the code does to them, and keeps it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from benchmarks import gate
from benchmarks.gate import Figures, cases, complaints, planned, read


@cache
def found(case: str) -> Figures:
    return planned(case)


@pytest.mark.long
@pytest.mark.parametrize("case", cases())
def test_no_figure_is_worse_than_the_kept_one(case: str) -> None:
    assert list(complaints(case, read()[case], found(case))) == []


def test_every_case_is_kept_and_no_other() -> None:
    assert list(read()) == cases()


@pytest.mark.parametrize(
    ("name", "share"), [("peak", 1.001), ("us", 1.00001), ("moved", 2.0), ("recomputed_us", 1.01), ("bound_us", 1.01)]
)
def test_a_kept_figure_that_the_code_no_longer_gives_is_named(name: str, share: float) -> None:
    case = "gpt 0.8 host"
    kept = read()[case]
    other = replace(kept, **{name: type(getattr(kept, name))(getattr(kept, name) * share)})
    assert len(list(complaints(case, other, found(case)))) == 1


def test_a_slower_plan_is_named_and_a_faster_one_is_not() -> None:
    case = "gpt 0.8 host"
    kept = read()[case]
    slower = replace(found(case), us=kept.us * (1 + 2 * gate.SLACK))
    assert any("takes" in line for line in complaints(case, kept, slower))
    assert list(complaints(case, kept, replace(slower, us=kept.us * 0.9))) == []
    over = replace(slower, us=kept.us, peak=kept.budget + 1)
    assert any("of" in line and "bytes" in line for line in complaints(case, kept, over))
