"""The search for the largest size, on steps whose bytes are a formula."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest

from memgraph.fit.largest import largest
from memgraph.report.report import Report
from passes import BudgetError

BUDGET = 1000


def _tried(nbytes: Callable[[int], int], seen: list[int]) -> Callable[[int], Report]:
    def tried(size: int) -> Report:
        seen.append(size)
        if nbytes(size) > BUDGET:
            raise BudgetError("too many", BUDGET, nbytes(size))
        return cast("Report", nbytes(size))

    return tried


FORMULAS: list[tuple[Callable[[int], int], int]] = [
    (lambda n: 100 + 70 * n, 12),
    (lambda n: 10 * n * n, 10),
    (lambda n: 900 + n, 100),
    (lambda n: 600 + 300 * n, 1),
    (lambda n: 500 + 250 * n, 2),
]


@pytest.mark.parametrize("first", [1, 2, 7, 64, 500])
@pytest.mark.parametrize(("nbytes", "expected"), FORMULAS)
def test_it_is_found_from_any_begin_with_the_next_size_that_does_not_fit(
    nbytes: Callable[[int], int], expected: int, first: int
) -> None:
    found = largest(_tried(nbytes, []), lambda size: nbytes(size) <= BUDGET, first)
    assert (found.size, found.next, found.next_nbytes) == (expected, expected + 1, nbytes(expected + 1))
    assert cast("int", found.report) == nbytes(expected)


@pytest.mark.long
@pytest.mark.parametrize("wrong", [lambda size: True, lambda size: False, lambda size: size % 3 == 0])
def test_wrong_guesses_cost_tries_and_change_nothing(wrong: Callable[[int], bool]) -> None:
    found = largest(_tried(lambda n: 100 + 70 * n, []), wrong)
    assert (found.size, found.next) == (12, 13)


def test_good_guesses_take_four_tries() -> None:
    seen: list[int] = []
    largest(_tried(lambda n: n, seen), lambda size: size <= BUDGET)
    assert seen == [2, 4, 1000, 1001]


def test_a_guess_begins_where_the_last_one_ended() -> None:
    guesses = list[int]()

    def likely(size: int) -> bool:
        guesses.append(size)
        return size <= 900  # too few

    seen = list[int]()
    found = largest(_tried(lambda n: n, seen), likely)
    assert found.size == BUDGET and len(seen) < 25
    assert guesses.count(640) == 1 and len(guesses) < 45


def test_sizes_are_multiples_of_a_step_up_to_a_limit() -> None:
    found = largest(_tried(lambda n: n, []), lambda size: size <= BUDGET, 64, step=64)
    assert (found.size, found.next) == (960, 1024)
    limited = largest(_tried(lambda n: n, []), lambda size: size <= BUDGET, 64, step=64, limit=512)
    assert (limited.size, limited.next_nbytes) == (512, 0)


def test_a_model_of_which_nothing_fits_raises_the_error_of_the_smallest_size() -> None:
    with pytest.raises(BudgetError) as error:
        largest(_tried(lambda n: 2000 + n, []), lambda size: False, first=8)
    assert error.value.smallest == 2001
