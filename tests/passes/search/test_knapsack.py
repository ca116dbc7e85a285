"""No choice of values within some room is worth more than the one that is made."""

from __future__ import annotations

from itertools import chain, combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from passes.lp import solver
from passes.search.knapsack import most_time

ITEMS = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 30)), max_size=9)


def best(items: list[tuple[int, int]], room: int) -> int:
    """Return the most time of any choice."""
    every = chain.from_iterable(combinations(items, count) for count in range(len(items) + 1))
    return max(sum(time for _, time in some) for some in every if sum(size for size, _ in some) <= room)


def test_two_smaller_values_may_be_worth_more() -> None:
    assert most_time([3, 2, 2], [5, 3, 3], 4) == (1, 2)


@given(ITEMS, st.integers(0, 60))
def test_no_choice_is_better(items: list[tuple[int, int]], room: int) -> None:
    sizes, times = [size / 64 for size, _ in items], [float(time) for _, time in items]
    kept = most_time(sizes, times, room / 64)
    assert len(set(kept)) == len(kept) and sum(items[place][0] for place in kept) <= room
    assert sum(items[place][1] for place in kept) == best(items, room)


@given(ITEMS, st.integers(0, 60))
def test_without_a_solver_what_is_kept_fits(items: list[tuple[int, int]], room: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solver, "is_installed", lambda: False)
        kept = most_time([size for size, _ in items], [time for _, time in items], room)
    assert sum(items[place][0] for place in kept) <= room
