"""A saved plan has its slices; that of another step is refused."""

from __future__ import annotations

import copy

import pytest
import torch

import memgraph
from tests.support.sliced_models import tokens
from tests.support.sliced_training import ROOM, assert_kept, batch, beside_eager, budget_of, headed, step


def test_a_saved_plan_has_its_slices() -> None:
    module = headed()
    first = memgraph.compile(copy.deepcopy(module), budget_of(module), slices="auto", offload=None)
    step(first)
    text = first.plan.to_json()
    again = beside_eager(module, plan=text, slices=None)
    assert again.plan.slices == first.plan.slices and again.plan.peak == first.plan.peak
    assert_kept(again)


@pytest.mark.long
def test_a_saved_plan_of_another_step_is_refused() -> None:
    first = memgraph.compile(headed(), ROOM, slices={"head": 4})
    step(first)
    plan = first.plan.to_json()
    with pytest.raises(memgraph.PlanError, match="the saved plan is for another shape"):
        memgraph.compile(headed(), ROOM, plan=plan)(*tokens(2, 32))
    with pytest.raises(memgraph.PlanError, match="the saved plan is for another model"):
        memgraph.compile(headed(bias=True), ROOM, plan=plan)(*batch())


def test_plans_with_and_without_slices_may_be_given_together() -> None:
    module = headed()
    trained, seen = (memgraph.compile(copy.deepcopy(module), ROOM, slices=asked) for asked in ({"head": 4}, None))
    step(trained)
    with torch.no_grad():
        expected = seen(*batch())
    model = memgraph.compile(module, ROOM, plan=[trained.plan.to_json(), seen.plan.to_json()])
    with torch.no_grad():
        assert torch.equal(model(*batch()), expected) and not model.plan.slices
    assert torch.equal(step(model), step(trained)) and model.plan.slices
