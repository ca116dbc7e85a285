"""The promise: measured <= forecast <= budget, and training bit-equal to eager's, on every model under every budget."""

from __future__ import annotations

import pytest

from tests.support.promise import Trial, trial
from tests.support.zoo import BESIDE, CASES, Case

# What a forecast may be above the measured: a page on transformers, 3 % where kernels choose their workspace as they run.
CONVOLUTIONS = ("resnet", "unet")
SECONDS = 2.0  # for a plan; the promise holds for any plan, and some searches would take 20

SHARES = [
    0.3,
    pytest.param(1.0, marks=pytest.mark.long),
    *(pytest.param(x, marks=pytest.mark.slow) for x in (0.75, 0.5)),
]
SMALL = ("mlp", "tied")
SOME = [case if case.name in SMALL else pytest.param(case, marks=pytest.mark.long) for case in CASES]


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("case", (*CASES, *BESIDE), ids=lambda case: case.name)
def test_the_budget_is_kept_and_training_is_equal(case: Case, share: float) -> None:
    assert_kept(case, trial(case, share, time_limit=SECONDS))


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.5, 0.3])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_so_it_is_when_plans_are_searched_to_the_end(case: Case, share: float) -> None:
    assert_kept(case, trial(case, share))


def assert_kept(case: Case, found: Trial) -> None:
    assert found.equal
    assert found.measured <= found.forecast <= found.budget
    loose = case.name in CONVOLUTIONS or case.beside  # the loop has dropped what lies beside the loss
    assert found.forecast - found.measured <= (0.03 * found.measured if loose else 4096)
    assert found.first is not None and found.first <= found.forecast


@pytest.mark.parametrize("case", SOME, ids=lambda case: case.name)
def test_recompute_alone_keeps_the_budget_too(case: Case) -> None:
    found = trial(case, 0.6, offload=None, time_limit=SECONDS)
    assert found.equal and found.offloads == 0
    assert found.measured <= found.forecast <= found.budget


@pytest.mark.parametrize("case", SOME, ids=lambda case: case.name)
def test_nothing_is_done_where_nothing_is_needed(case: Case) -> None:
    found = trial(case, 1.2)
    assert found.equal
    assert (found.recomputes, found.offloads) == (0, 0)
