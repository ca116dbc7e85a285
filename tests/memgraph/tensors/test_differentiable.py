"""Results that are views which autograd doesn't differentiate stay so, and eager's gradients are made of the others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import memgraph
from tests.support.captured_calls import Plain, X

Results = tuple[Tensor, ...]


def _without_gradients(view: Callable[[Tensor], Tensor]) -> Callable[[Plain, Tensor], Results]:
    def forward(model: Plain, x: Tensor) -> Results:
        y = model.linear(x)
        with torch.no_grad():
            seen = view(y)
        return y.sum(), y, seen

    return forward


def _of_a_weight(model: Plain, x: Tensor) -> Results:
    with torch.no_grad():
        weight = model.linear.weight.t()
    return model.linear(x).sum(), weight


def _of_the_input(model: Plain, x: Tensor) -> Results:
    with torch.no_grad():
        some = x[:2]
    return model.linear(x).sum(), some


def _of_a_detached_result(model: Plain, x: Tensor) -> Results:
    y = model.linear(x)
    return y.sum(), y, y.detach()[:, -1]


FORWARDS = {
    "a column": _without_gradients(lambda y: y[:, -1]),
    "the same elements": _without_gradients(lambda y: y.view(-1)),
    "one of two halves": _without_gradients(lambda y: y.chunk(2, 1)[0]),
    "a weight": _of_a_weight,
    "the input": _of_the_input,
    "a detached result": _of_a_detached_result,
}


@pytest.mark.parametrize("name", FORWARDS)
def test_a_view_that_autograd_does_not_differentiate_requires_no_gradient(name: str) -> None:
    eager, model = Plain(FORWARDS[name]), Plain(FORWARDS[name])
    model.load_state_dict(eager.state_dict())
    compiled = memgraph.compile(model, "1GB")
    expected, found = eager(X), compiled(X)
    assert all(map(torch.equal, expected, found))
    assert not found[-1].requires_grad and found[-1].numpy().shape == tuple(expected[-1].shape)
    expected[0].backward()
    found[0].backward()
    for wanted, parameter in zip(eager.parameters(), model.parameters(), strict=True):
        assert (wanted.grad is None) == (parameter.grad is None)
        assert wanted.grad is None or wanted.grad.equal(parameter.grad)  # type: ignore[arg-type]
