"""A sweep, a fit and advice cut what `compile` cuts: they need no more than it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import memgraph
from memgraph.fit.described_model import ModelCall
from memgraph.fit.device_profile import DeviceProfile
from memgraph.fit.fitted_step import FittedStep, Fitting
from passes import BudgetError
from tests.support.block_models import WIDTH, WORDS, Words, head_in_blocks, words
from tests.support.sliced_training import batch, headed

pytestmark = pytest.mark.usefixtures("small_windows")
WEIGHT = WORDS * WIDTH * 4  # bytes of the head, which whole weights need more than
CPU = DeviceProfile("cpu", "cpu", 10**10, {"float32": 1e11}, 1e10, link={"out": 1e9, "back": 1e9})


@pytest.mark.long
@head_in_blocks
def test_a_sweep_goes_below_what_whole_weights_need() -> None:
    model = Words()
    options: dict[str, Any] = {"optimizer": torch.optim.Adam(model.parameters()), "accumulate": False, "time_limit": 0}
    found = memgraph.sweep(model, *words(), budgets=["1GB", WEIGHT], **options)
    plain, cut = found.points
    assert (
        plain.decisions == 0
        and found.needs == plain.peak == memgraph.plan(model, *words(), budget="1GB", **options).peak
    )
    assert cut.fits and cut.peak <= WEIGHT and found.smallest < 0.6 * WEIGHT
    report = memgraph.plan(model, *words(), budget=found.smallest, **options)
    assert report.row_blocks and report.peak <= found.smallest


@pytest.mark.long
def test_a_sweep_slices_no_step_that_fits() -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"slices": "auto", "offload": None, "time_limit": 0}
    model = headed()
    found = memgraph.sweep(model, *batch(), budgets=["1GB", 1], **options)
    assert found.needs == memgraph.plan(model, *batch(), budget="1GB", **options).peak
    report = memgraph.plan(model, *batch(), budget=found.smallest, **options)
    assert report.slices and report.peak <= found.smallest


def fitted(budget: int) -> FittedStep:
    with torch.device("meta"):
        model = Words()
        now, then = torch.empty(2, 8, dtype=torch.long)
    return Fitting(CPU, budget)(ModelCall(model, (now, then), {}, torch.optim.Adam(model.parameters())))


def test_a_fit_goes_below_what_whole_weights_need() -> None:
    report = fitted(WEIGHT).smallest_plan()
    assert report.peak <= WEIGHT
    assert {row.weight for row in report.row_blocks} == {"token.weight", "head.weight"}
    assert not fitted(1 << 30).smallest_plan().row_blocks


@pytest.mark.long
def test_the_error_of_a_fit_names_a_budget_that_works() -> None:
    with pytest.raises(BudgetError) as caught:
        fitted(1 << 17).smallest_plan()
    works = caught.value.smallest
    assert works < WEIGHT and fitted(works).smallest_plan().peak <= works
