"""An ordinary training loop around a compiled module comes to what it comes to around the plain one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memgraph
from tests.support.compare import ROOM, Fact, assert_alike, batch, both, steps, tight
from tests.support.models import Function, Net, Running


@pytest.mark.long
@both
@pytest.mark.parametrize("kind_of", [torch.optim.SGD, torch.optim.AdamW])
def test_an_ordinary_loop_is_bit_equal(kind_of: Any) -> None:
    def loop(model: Any) -> list[Fact]:
        optimizer = kind_of(model.parameters(), lr=0.01, weight_decay=0.1)
        found: list[Fact] = []
        for step in range(4):
            loss = model(batch(seed=step)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            found += [loss, *(p.grad.clone() for p in model.parameters())]
            optimizer.step()
        return found

    assert_alike(loop, Running)


def test_an_optimizer_that_was_built_before_trains_the_compiled_module() -> None:
    found = []
    for compiles in (False, True):
        torch.manual_seed(0)
        module = Net()
        optimizer = torch.optim.Adam(module.parameters())
        model = memgraph.compile(module, ROOM, optimizer=optimizer) if compiles else module
        for _ in range(3):
            model(batch()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([p.detach().clone() for p in module.parameters()])
    assert all(map(torch.equal, *found))


def test_the_optimizer_that_was_given_is_an_attribute_and_without_one_there_is_none() -> None:
    module = Net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    assert memgraph.compile(module, ROOM, optimizer=optimizer).optimizer is optimizer
    assert not hasattr(memgraph.compile(module, ROOM), "optimizer")


def test_asking_for_an_optimizer_that_was_not_given_says_so() -> None:
    with pytest.raises(AttributeError, match="no optimizer was given"):
        _ = memgraph.compile(Net(), ROOM).optimizer


@pytest.mark.long
@both
def test_several_backwards_accumulate() -> None:
    def loop(model: Any) -> list[Fact]:
        found: list[Fact] = []
        for step in range(4):
            model(batch(seed=step)).square().mean().backward()
            found += [p.grad.clone() for p in model.parameters()]
        return found

    assert_alike(loop, Running)


@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_between_steps(to_none: bool) -> None:
    def loop(model: Any) -> list[Fact]:
        for step in range(3):
            model.zero_grad(set_to_none=to_none)
            model(batch(seed=step)).square().mean().backward()
        return []

    assert_alike(loop)


@pytest.mark.long
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_between_forward_and_backward(first: bool, to_none: bool) -> None:
    def loop(model: Any) -> list[Fact]:
        if not first:
            model(batch(seed=3)).sum().backward()
        loss = model(batch()).square().mean()
        model.zero_grad(set_to_none=to_none)
        loss.backward()
        return []

    assert_alike(loop)


@tight
def test_gradients_that_come_between_forward_and_backward_are_added_to() -> None:
    def loop(model: Any) -> list[Fact]:
        loss = model(batch()).square().mean()
        for i, p in enumerate(model.parameters()):
            p.grad = torch.full_like(p, 0.5) if i % 2 else None
        loss.backward()
        return []

    assert_alike(loop)


@tight
def test_a_gradient_tensor_that_the_loop_holds_is_added_to_in_place() -> None:
    def loop(model: Any) -> list[Fact]:
        model(batch()).sum().backward()
        held = [p.grad for p in model.parameters()]
        model(batch(seed=2)).sum().backward()
        assert all(p.grad is grad for p, grad in zip(model.parameters(), held, strict=True))
        return held

    assert_alike(loop)


@tight
def test_no_two_gradients_share_memory() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.a + self.b

    def loop(model: Any) -> list[Fact]:
        model(batch(1)).sum().backward()
        model.a.grad.mul_(3)
        return []

    assert_alike(loop, Sum)


def test_clipping_and_a_schedule_of_the_learning_rate() -> None:
    def loop(model: Any) -> list[Fact]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=4)
        found: list[Fact] = []
        for step in range(4):
            model(batch(seed=step)).square().mean().backward()
            found.append(nn.utils.clip_grad_norm_(model.parameters(), 0.01))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        return found

    assert_alike(loop)


@tight
def test_parameters_are_frozen_and_unfrozen_between_steps() -> None:
    def loop(model: Any) -> list[Fact]:
        found = steps(model, 1)
        model.first.requires_grad_(False)
        found += steps(model, 1)
        model.requires_grad_(False)
        result = model(batch())
        assert not result.requires_grad
        model.second.requires_grad_(True)
        found += [result, *steps(model, 1)]
        model.requires_grad_(True)
        return found + steps(model, 1)

    assert_alike(loop)


@tight
def test_a_parameter_that_forward_does_not_read_has_no_gradient() -> None:
    assert_alike(lambda model: steps(model, 1), lambda: Function(lambda linear, x: x * linear.bias))
