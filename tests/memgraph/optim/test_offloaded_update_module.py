"""A module with offloaded state keeps its parameters, its state_dict, its hooks and its buffers."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memgraph.storage.mapped_storage import is_offloaded
from tests.support.streamed_state import (
    ADAMW,
    WIDTH,
    Twins,
    batch,
    chain,
    facts,
    far,
    loss,
    same,
    streamed,
    streams,
    tightest,
    train,
)

pytestmark = pytest.mark.usefixtures("small_windows")


class Tied(nn.Module):
    """Two layers with one weight, and between them some with their own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight
        self.between = chain(5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.between(self.first(x).relu()))
        return out


def frozen() -> nn.Module:
    model = chain()
    for i in (0, 4, 6):
        model[i].weight.requires_grad_(False)  # type: ignore[index]
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied": Tied,
    "frozen": frozen,
    "buffers": partial(chain, 6, partial(nn.BatchNorm1d, WIDTH)),
    "dropout": partial(chain, 6, partial(nn.Dropout, 0.3)),
}


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    Twins(MODELS[name]).train()


@pytest.mark.long
def test_a_parameter_is_frozen_and_thawed() -> None:
    twins = Twins()
    for turn in range(4):
        for model in (twins.plain, twins.module):
            for i in (2, 6):
                model[i].weight.requires_grad_(turn != 1 and turn != 2)  # type: ignore[index]
        twins.step(seed=turn)
        assert streams(twins.model)


@pytest.mark.long
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("which", ["tensor", "accumulated"])
def test_hooks_of_parameters(when: str, which: str) -> None:
    """A hook gets the gradient, which is therefore kept on the device; the others are offloaded."""

    def hook(seen: list[Tensor], model: nn.Module) -> None:
        def doubled(gradient: Tensor) -> Tensor:
            seen.append(gradient.clone())
            return gradient * 2

        weight = model[4].weight  # type: ignore[index]
        if which == "tensor":
            weight.register_hook(doubled)
        else:
            weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))

    theirs, ours = list[Tensor](), list[Tensor]()
    twins = Twins(budget=tightest() + (1 << 20))
    if when == "after":
        twins.step()
    hook(theirs, twins.plain)
    hook(ours, twins.module)
    for seed in range(3):
        twins.step(seed=seed)
    assert same(list(ours), list(theirs))
    assert len(ours) == 3
    assert streams(twins.model)


def test_the_state_dict_is_the_plain_models() -> None:
    twins = Twins()
    twins.train(3)
    ours, theirs = twins.model.state_dict(), twins.plain.state_dict()
    assert list(ours) == list(theirs)
    assert same(list(ours.values()), list(theirs.values()))
    kept = {name: value.clone() for name, value in ours.items()}
    file, states = io.BytesIO(), io.BytesIO()
    torch.save(ours, file)
    torch.save(twins.ours.state_dict(), states)
    assert len(file.getvalue()) < 2 * sum(value.nbytes for value in kept.values())
    plain = chain()
    plain.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    optimizer = ADAMW(plain.parameters())
    optimizer.load_state_dict(torch.load(io.BytesIO(states.getvalue()), weights_only=True))
    twins.plain.zero_grad()
    assert same(facts(plain, optimizer), facts(twins.plain, twins.theirs))


def saved(twins: Twins) -> tuple[Any, Any]:
    return copy.deepcopy(twins.plain.state_dict()), copy.deepcopy(twins.theirs.state_dict())


@pytest.mark.long
def test_a_state_is_loaded_at_any_time() -> None:
    other = Twins(budget=10**9)
    other.train_plain(2)
    model, optimizer = saved(other)
    twins = Twins()

    def load() -> None:
        for each, its in ((twins.plain, twins.theirs), (twins.model, twins.ours)):
            each.load_state_dict(copy.deepcopy(model))
            its.load_state_dict(copy.deepcopy(optimizer))

    load()  # before the first call
    twins.assert_same()
    twins.train(2)
    load()
    twins.assert_same()
    twins.train(3)
    assert far(twins.module, twins.ours) >= {"parameter", "state"}


@pytest.mark.long
def test_a_state_is_loaded_by_assignment() -> None:
    twins = Twins()
    twins.train(2)
    begin = chain().state_dict()
    for model in (twins.plain, twins.model):
        optimizers = twins.theirs, twins.ours
        model.load_state_dict({name: value.clone() for name, value in begin.items()}, assign=True)
    for optimizer, model in zip(optimizers, (twins.plain, twins.model), strict=True):
        optimizer.state.clear()
        optimizer.param_groups[0]["params"] = list(model.parameters())
    twins.train(3)


@pytest.mark.long
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))])
def test_copies_of_a_compiled_module_train_independently(copied: Callable[[Any], Any]) -> None:
    twins = Twins()
    twins.train(2)
    begin = facts(twins.model, twins.ours)
    again = copied(twins.model)
    plain = copy.deepcopy(twins.plain)
    ours, theirs = ADAMW(again.parameters()), ADAMW(plain.parameters())
    for seed in range(3):
        torch.manual_seed(1)
        a = train(plain, theirs, lambda model, x: loss(model(x)), batch(seed))
        torch.manual_seed(1)
        b = train(again, ours, lambda model, x: model(x), batch(seed))
        assert torch.equal(a, b)
        assert same(facts(again, ours), facts(plain, theirs))
    assert streams(again)
    assert same(facts(twins.model, twins.ours), begin)
    twins.train(2)


@pytest.mark.long
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))])
def test_copies_of_the_optimizer_step_plainly(copied: Callable[[Any], Any]) -> None:
    twins = Twins()
    twins.train(2)
    begin = facts(twins.model, twins.ours)
    ours, theirs = copied(twins.ours), copied(twins.theirs)
    for optimizer in (ours, theirs):
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    pairs = zip(ours.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert same(facts(twins.model, twins.ours), begin)


@torch.no_grad()
def changed(model: nn.Module, how: str) -> None:
    for parameter in model.parameters():
        if how == "data":
            parameter.data = parameter.detach() * 1.5
        elif how == "transposed" and parameter.dim() > 1:
            parameter.data = parameter.detach().t().contiguous().t()
        elif how == "in place":
            parameter.mul_(0.5)
        elif how == "element":
            parameter.flatten()[1] = 3.0


@pytest.mark.long
@pytest.mark.parametrize("how", ["data", "transposed", "in place", "element"])
def test_parameters_are_changed_between_steps(how: str) -> None:
    twins = Twins()
    twins.train(2)
    for turn in range(3):
        for model in (twins.plain, twins.module):
            changed(model, how)
        twins.step(seed=turn)
    assert streams(twins.model)
    assert "parameter" in far(twins.module)


@pytest.mark.long
def test_a_parameter_that_is_changed_before_backward_is_an_error_as_in_eager() -> None:
    twins = Twins()
    twins.train(2)
    made = twins.model(batch())
    with torch.no_grad():
        next(iter(twins.module[4].parameters())).mul_(2)  # type: ignore[index]
    with pytest.raises(RuntimeError, match=r"changed|modified"):
        made.backward()


@pytest.mark.long
def test_parameters_that_are_rebound_while_a_step_runs() -> None:
    """Backward takes what forward took, also if another forward has run since."""
    twins = Twins()
    twins.train(2)

    def step(model: nn.Module, optimizer: Any, run: Any) -> Tensor:
        optimizer.zero_grad()
        first = run(model, batch(1))
        changed(twins.plain if model is twins.plain else twins.module, "data")
        second = run(model, batch(2))
        first.backward()
        kept = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        second.backward()
        optimizer.step()
        return torch.cat([grad.flatten() for grad in (first.detach(), second.detach(), *kept)])

    twins.turns(step, 2)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_another_dtype(dtype: torch.dtype) -> None:
    twins = Twins(given=False)
    twins.train(2)
    for model, optimizer in ((twins.plain, twins.theirs), (twins.model, twins.ours)):
        optimizer.zero_grad()
        model.to(dtype)
        optimizer.state.clear()

    def step(model: nn.Module, optimizer: Any, run: Any) -> Tensor:
        return train(model, optimizer, run, batch().to(dtype))

    model = streamed(twins.module, 2 * twins.budget) if dtype is torch.float64 else twins.model
    twins.budget *= 1 + (dtype is torch.float64)
    twins.model = model
    for _ in range(3):
        twins.step(step)


@pytest.mark.long
def test_gradients_that_the_plan_has_on_disk_are_there_before_forward() -> None:
    """An earlier call with another plan, or the user, may have left them on the device."""
    twins = Twins()

    def begin(model: nn.Module, optimizer: Any, run: Any) -> Tensor:
        optimizer.zero_grad()
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        made: Tensor = run(model, batch())
        if model is twins.model:
            gradients = {parameter: parameter.grad for parameter in model.parameters()}
            placed = {key: value is not None and is_offloaded(value) for key, value in gradients.items()}
            names = {name for name, parameter in twins.module.named_parameters() if placed[parameter]}
            wanted = {name.removesuffix("_grad") for name in streams(twins.model) if name.endswith("_grad")}
            assert wanted and {name.replace(".", "_") for name in names} >= {name.strip("_") for name in wanted}
        made.backward()
        optimizer.step()
        return made.detach()

    for _ in range(3):
        twins.step(begin)
