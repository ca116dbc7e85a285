"""A loss may be part of the step, be returned by the module, or be made of whatever it returns."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import memgraph
from memgraph.profile.memory_meter import measure_peak, resident_bytes
from tests.support.compare import ROOM, Fact, assert_alike, batch, both, same_gradients, tight
from tests.support.models import Function, Heads, Net


def test_loss_is_part_of_the_step() -> None:
    module, x, target = Net(), batch(), batch(seed=9)
    compiled = memgraph.compile(module, ROOM, loss=F.mse_loss)
    for _ in range(2):
        torch.manual_seed(3)
        theirs = F.mse_loss(module(x), target)
        theirs.backward()
        expected = [p.grad.clone() for p in module.parameters() if p.grad is not None]
        module.zero_grad()
        torch.manual_seed(3)
        ours = compiled(x, target=target)
        ours.backward()
        assert torch.equal(ours, theirs)
        assert all(
            torch.equal(p.grad, grad)
            for p, grad in zip(module.parameters(), expected, strict=True)
            if p.grad is not None
        )
        module.zero_grad()


@tight
def test_a_loss_without_a_target() -> None:
    def loop(model: Any) -> list[Fact]:
        found: list[Fact] = []
        for step in range(2):
            out = model(batch(seed=step))
            loss = out if isinstance(model, memgraph.CompiledModule) else out.square().mean()
            loss.backward()
            found.append(loss)
        return found

    assert_alike(loop, loss=lambda out: out.square().mean())


def test_state_dict_with_a_loss_has_the_keys_of_the_module() -> None:
    module = Net()
    compiled = memgraph.compile(module, ROOM, loss=F.mse_loss)
    assert list(compiled.state_dict()) == list(module.state_dict())
    assert [id(p) for p in compiled.parameters()] == [id(p) for p in module.parameters()]
    compiled.eval()
    assert not module.training
    compiled.load_state_dict({key: value + 1 for key, value in module.state_dict().items()})
    assert not hasattr(compiled, "nothing")


@tight
def test_a_scalar_output_is_taken_for_the_loss() -> None:
    def loop(model: Any) -> list[Fact]:
        found: list[Fact] = []
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for step in range(3):
                result = model(batch(seed=step))
                result["loss"].backward()
                found += result.values()
        return found

    assert_alike(loop, Heads)


@both
def test_a_loss_of_other_outputs_warns_once_has_the_right_gradients_at_once_and_is_planned_from_then_on() -> None:
    warned: list[str] = []

    def loop(model: Any) -> list[Fact]:
        found: list[Fact] = []
        for step in range(3):
            x = batch(seed=step).requires_grad_()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                result = model(x)
                (result["left"].exp().mean() + result["right"].square().mean() + result["loss"]).backward()
            warned.extend(f"{step} {warning.category.__name__}" for warning in caught)
            found += [x.grad, *result.values()]
        return found

    assert_alike(loop, Heads)
    assert warned == ["0 RuntimeWarning"]


def test_the_warning_names_the_line_of_the_loop() -> None:
    compiled = memgraph.compile(Heads(), ROOM)
    loss = compiled(batch())["left"].sum()
    with pytest.warns(RuntimeWarning, match=r"backward was planned") as caught:
        loss.backward()
    assert "outside of the budget" in str(caught[0].message)


@tight
def test_a_loss_of_other_outputs_through_autograd_grad_and_retained() -> None:
    def loop(model: Any) -> Sequence[Fact]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = model(batch())
            found = list(
                torch.autograd.grad(
                    result["left"].sum(), [model.left.weight, model.body.first.weight], retain_graph=True
                )
            )
            result["left"].sum().backward(retain_graph=True)
            result["left"].square().sum().backward()
        return found

    assert_alike(loop, Left)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_loss_of_other_outputs_behind_a_checkpoint_inside(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)

        def part(self, x: Tensor) -> Tensor:
            return self.drop(self.norm(self.first(x)).sin())

        def forward(self, x: Tensor, checkpointed: bool) -> tuple[Tensor, Tensor]:
            y = checkpoint(self.part, x, use_reentrant=reentrant) if checkpointed else self.part(x)
            assert isinstance(y, Tensor)
            return y.sum(), y.cos()

    def loop(model: Any) -> list[Fact]:
        compiled = isinstance(model, memgraph.CompiledModule)  # in eager, a checkpoint updates statistics twice
        x = batch().requires_grad_()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss = model(x, compiled)[1].square().sum()
            loss.backward(retain_graph=True)
            loss.backward()
        return [x.grad]

    assert_alike(loop, Checkpointed)


def test_a_loss_of_other_outputs_of_a_forward_that_changes_its_input() -> None:
    def function(linear: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        x.mul_(0.5)
        y = linear(x).sin()
        return y.sum(), y

    def loop(model: Any) -> list[Fact]:
        x = batch()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model(x)[1].square().sum().backward()
        return [x]

    assert_alike(loop, lambda: Function(function))


def test_a_retained_loss_of_other_outputs_of_a_forward_that_changes_its_buffers() -> None:
    class Centred(nn.Module):
        mean: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("mean", torch.zeros(8))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = (self.linear(x) - self.mean).sin()
            with torch.no_grad():
                self.mean.add_(1)
            return y.sum(), y

    def loop(model: Any) -> list[Fact]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss = model(batch())[1].square().sum()
            loss.backward(retain_graph=True)
            loss.backward()
        return []

    assert_alike(loop, Centred)


class Left(Heads):
    """Everything that it returns depends on every parameter that is asked for."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.body(x)
        left = self.left(h)
        return {"loss": left.square().mean() + self.right(h).mean() * 0, "left": left + self.right(h).sum() * 0}


@tight
def test_the_first_planned_step_after_the_warning_is_measured() -> None:
    compiled = memgraph.compile(Heads(), ROOM)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            result = compiled(batch())
            (result["left"].sum() + result["right"].sum() + result["loss"]).backward()
            compiled.zero_grad()
    assert compiled.plan.measured is not None
    assert compiled.plan.measured <= compiled.plan.peak


def test_what_is_noted_for_a_loss_of_other_outputs_is_within_the_forecast() -> None:
    class Table(nn.Module):
        rows: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("rows", torch.randn(50_000))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.linear(x) * self.rows[:8]
            return y.sum(), y

    module, x = Table(), batch()
    compiled = memgraph.compile(module, ROOM)
    there = resident_bytes([*module.parameters(), *module.buffers(), x])
    compiled(x)
    _, allocated = measure_peak(lambda: compiled(x)[0].backward())
    assert allocated is not None
    assert there + allocated.peak <= compiled.plan.peak


class Scored(nn.Module):
    """A model that returns its loss, and a score of a separate head that no loss reads."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.score = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.body(x)
        return y.square().mean(), self.score(y.sin())


def test_a_score_of_which_no_loss_is_made_keeps_the_first_step_within_its_budget() -> None:
    model, x = Scored(), torch.randn(64, 16)
    eager = copy.deepcopy(model)
    compiled = memgraph.compile(model, memgraph.plan(model, x, budget=None).peak)
    for _ in range(2):
        for each in (eager, compiled):
            each.zero_grad()
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                each(x)[0].backward()
        assert same_gradients(model.body, eager.body)
        assert model.score.weight.grad is None
        assert compiled.plan.measured is not None and compiled.plan.measured <= compiled.plan.peak
    assert len(compiled.plans) == 2  # the later ones are planned for the loss alone
