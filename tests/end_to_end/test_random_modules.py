"""The promise on random modules: eager's bits, and measured <= forecast <= budget."""

from __future__ import annotations

import pytest

from tests.support.beside_eager import check
from tests.support.random_modules import LOOPS, SHARING, module_of, random_module
from tests.support.random_pieces import PIECES

FEW, QUICK, ALL = 40, 200, 2000
LONG = [pytest.param(seed, marks=pytest.mark.long) for seed in range(FEW, QUICK)]


@pytest.mark.parametrize("seed", [*range(FEW), *LONG])
def test_a_random_module_trains_as_in_eager_within_its_budget(seed: int) -> None:
    check(random_module(seed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(QUICK, ALL))
def test_so_does_any_other(seed: int) -> None:
    check(random_module(seed))


@pytest.mark.slow
@pytest.mark.parametrize(  # a weight that one call uses twice sums in another order beside another call: docs/limits.md
    ("piece", "loop"),
    [(piece, loop) for piece in sorted(PIECES) for loop in LOOPS if piece not in SHARING or loop != "called twice"],
)
def test_so_does_each_piece_by_itself(piece: str, loop: str) -> None:
    check(module_of(["linear", piece, "linear"], loop=loop))


@pytest.mark.parametrize("op", ["inverse", "cholesky"])
def test_an_op_that_checks_its_matrix_is_captured_beside_a_buffer_that_is_written(op: str) -> None:
    check(module_of(["linear", "queue", op, "batch_norm"]))


def test_a_seed_makes_the_same_module_every_time() -> None:
    assert random_module(3) == random_module(3) != random_module(4)
