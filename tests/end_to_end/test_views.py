"""Inputs, parameters and buffers that forward returns are the same tensors, or views of them, if they need no autograd."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memgraph
from tests.support.compare import ROOM


class Handing(nn.Module):
    def __init__(self, then: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 6)
        self.linear.bias.requires_grad_(False)
        self.mean: Tensor
        self.register_buffer("mean", torch.arange(6.0))
        self.then = then

    def forward(self, x: Tensor) -> Any:
        result = self.then(self, x)
        return self.linear(x), result


VIEWS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "flat": lambda m, x: x.view(-1),
    "slice": lambda m, x: x[1:, ::2],
    "transposed": lambda m, x: x.t(),
    "expanded": lambda m, x: x[:1].expand(5, 4),
    "detached": lambda m, x: x.detach(),
    "of a buffer": lambda m, x: m.mean[2:],
    "of a frozen parameter": lambda m, x: m.linear.bias.view(2, 3),
    "of a parameter, detached": lambda m, x: m.linear.weight.detach().t(),
    "of what was changed": lambda m, x: x.mul_(2)[1:],
}


def test_a_view_of_a_parameter_is_one_where_gradients_are_off() -> None:
    module = Handing(lambda m, x: m.linear.weight.t())
    with torch.no_grad():
        found, expected = memgraph.compile(module, ROOM)(whole())[1], module(whole())[1]
    assert lies(found) == lies(expected) and found._base is expected._base is module.linear.weight


def whole() -> Tensor:
    """A tensor that begins in the midst of a storage."""
    return torch.arange(20.0).view(5, 4)[1:4]


def lies(tensor: Tensor) -> Any:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.requires_grad


@pytest.mark.long
@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("grad", [False, True])
def test_a_view_shares_its_memory_as_in_eager(name: str, grad: bool) -> None:
    module = Handing(VIEWS[name])
    compiled = memgraph.compile(copy.deepcopy(module), ROOM)
    with torch.set_grad_enabled(grad):
        for _ in range(2):
            x, y = whole(), whole()
            (out, view), (expected, other) = compiled(x), module(y)
            assert torch.equal(out, expected) and torch.equal(view, other)
            assert lies(view) == lies(other) and view._is_view() == other._is_view()
            if grad:
                out.sum().backward()
                expected.sum().backward()
            for result in (view, other):
                with torch.no_grad():
                    result[0].zero_()
            assert torch.equal(x, y)
            assert all(map(torch.equal, compiled.state_dict().values(), module.state_dict().values()))
    assert (module.linear.weight.grad is not None) == grad


@pytest.mark.long
@pytest.mark.parametrize(
    "then", [lambda m, x: m.linear.bias, lambda m, x: m.mean, lambda m, x: x, lambda m, x: m.linear.weight]
)
def test_what_is_returned_whole_is_the_same_object(then: Any) -> None:
    module = Handing(then)
    compiled, x = memgraph.compile(module, ROOM), whole()
    with torch.no_grad():
        assert compiled(x)[1] is then(module, x)
    if then(module, x) is not module.linear.weight:
        assert compiled(x)[1] is then(module, x)


def test_the_gradient_of_a_parameter_that_is_returned_comes_with_the_rest_of_it() -> None:
    module = Handing(lambda m, x: (m.linear.weight, m.linear.weight.t(), m.linear.weight.detach()))
    twin = copy.deepcopy(module)
    for model in (memgraph.compile(module, ROOM), twin):
        out, (weight, turned, fixed) = model(whole())
        (out.sin().sum() + weight.exp().sum() + turned.square().sum() + fixed.sum()).backward()
    assert module.linear.weight.grad is not None and twin.linear.weight.grad is not None
    assert torch.equal(module.linear.weight.grad, twin.linear.weight.grad)
