"""`compile` refuses an optimizer that can't be planned, with advice that works."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import memgraph
from memgraph.optim.update_unit import UpdateUnit, unit_of
from memgraph.profile.memory_meter import resident_bytes
from memgraph.tensors.parameter_groups import state_tensors
from tests.support.streamed_state import batch, chain, far, loss, streamed, tightest

ROOM = 1 << 30


class Counting(optim.AdamW):
    """Counts its steps where all parameters share it."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
        return super().step(closure)


class Owning(optim.SGD):
    """Has its parameters in an attribute too, and changes all of them in each step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.owned = self.param_groups[0]["params"]

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            torch._foreach_mul_(self.owned, 0.9)
        return super().step(closure)


def train(model: nn.Module, optimizer: optim.LBFGS) -> None:
    def again() -> Tensor:
        optimizer.zero_grad()
        found = loss(model(batch()))
        found.backward()
        return found

    optimizer.step(again)


@pytest.mark.parametrize(
    ("kind", "options", "why"),
    [
        (optim.LBFGS, {}, "closure"),
        (optim.SparseAdam, {}, "does not support dense gradients"),
        (optim.Adam, {"differentiable": True}, "leaf Variable"),
        (optim.Adam, {"capturable": True}, "capturable=True"),
    ],
)
@pytest.mark.parametrize("offload", ["auto", None])
def test_what_no_step_can_be_planned_with_is_refused_before_there_is_one(
    kind: type[optim.Optimizer], options: dict[str, Any], why: str, offload: str | None
) -> None:
    model = chain(2)
    text = rf"^{kind.__name__} can't be planned, since its step can't be tried .*{why}.*compile without optimizer="
    with pytest.raises(memgraph.UpdateError, match=text):
        memgraph.compile(model, ROOM, optimizer=kind(model.parameters(), **options), offload=offload)


def test_one_that_changes_all_parameters_in_each_step_is_planned_and_not_cut() -> None:
    module = chain(2)
    optimizer = Owning(module.parameters())
    assert unit_of(optimizer) is UpdateUnit.ALL
    plain = copy.deepcopy(module)
    theirs, model = Owning(plain.parameters()), memgraph.compile(module, ROOM, optimizer=optimizer, loss=loss)
    for seed in range(3):
        loss(plain(batch(seed))).backward()
        model(batch(seed)).backward()
        for each in (theirs, optimizer):
            each.step()
            each.zero_grad()
        assert all(map(torch.equal, plain.parameters(), module.parameters()))


@pytest.mark.long
def test_with_a_closure_a_model_trains_offloaded_once_its_optimizer_is_left_out() -> None:
    plain = chain()
    model = copy.deepcopy(plain)
    theirs, ours = (optim.LBFGS(module.parameters(), max_iter=2) for module in (plain, model))
    with pytest.raises(TypeError, match=r"LBFGS can't be planned.*compile without optimizer="):
        memgraph.compile(model, ROOM, optimizer=ours)
    compiled = streamed(model, tightest(kind=None), loss=None)
    for _ in range(2):
        train(plain, theirs)
        train(compiled, ours)
        assert all(map(torch.equal, compiled.parameters(), plain.parameters()))
    assert "parameter" in far(model)


def needed(model: nn.Module, optimizer: optim.Optimizer) -> int:
    """Bytes of parameters and states, once they are there."""
    model, optimizer = copy.deepcopy((model, optimizer))
    loss(model(batch().to(next(model.parameters()).dtype))).backward()
    optimizer.step()
    return resident_bytes([*model.parameters(), *state_tensors(optimizer)])


REFUSED: dict[str, tuple[Callable[[Any], optim.Optimizer], torch.dtype, str]] = {
    "counting": (
        Counting,
        torch.float32,
        "Counting does not update a parameter alone as it does among others.*keep it",
    ),
    "unsteady": (
        lambda p: optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
        torch.bfloat16,
        "SGD with fused=True is not deterministic in torch.bfloat16, .*; set fused=False",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_state_that_can_not_be_offloaded_and_does_not_fit_is_refused_before_the_first_step(name: str) -> None:
    make, dtype, why = REFUSED[name]
    model = chain(2).to(dtype)
    optimizer = make(model.parameters())
    least = needed(model, optimizer)
    text = rf"^{why}.*\. Parameters, buffers and all states are {least} bytes, over the budget of {least - 1}; where they fit, "
    with pytest.raises(memgraph.UpdateError, match=text):
        memgraph.compile(model, least - 1, optimizer=optimizer)
    assert not optimizer.state
    memgraph.compile(model, least, optimizer=optimizer)  # what else there has to be depends on the call
    memgraph.compile(model, least - 1, optimizer=optimizer, offload=None)  # where it is not the optimizer's fault


def test_a_plan_for_too_little_still_says_how_much_would_do() -> None:
    model = chain(2)
    with pytest.raises(memgraph.BudgetError) as caught:
        memgraph.plan(model, batch(), budget=1, optimizer=Counting(model.parameters()), loss=loss, time_limit=0)
    assert caught.value.smallest > needed(model, Counting(model.parameters()))


def test_what_is_not_steady_stays_on_the_device() -> None:
    """In windows it would be refused, in mid training."""
    model = chain(2).bfloat16()
    optimizer = optim.SGD(model.parameters(), lr=0.1, fused=True)
    x = batch().bfloat16()
    with pytest.raises(memgraph.BudgetError) as caught:
        memgraph.plan(model, x, budget=1, optimizer=optimizer, loss=loss, time_limit=0)
    compiled = memgraph.compile(model, caught.value.smallest, optimizer=optimizer, loss=loss, time_limit=0)
    for _ in range(2):
        compiled(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not far(model, optimizer)
