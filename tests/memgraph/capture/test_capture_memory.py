"""In-place changes of forward, and the layout of gradients, are captured as in eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memgraph.capture.capture import capture
from memgraph.errors import CaptureError
from memgraph.graph.captured import Output
from tests.support.captured_calls import TOKENS, Plain, X, agrees


def test_a_parameter_that_forward_changes() -> None:
    agrees(nn.Sequential(nn.Embedding(7, 4, max_norm=0.5), nn.Linear(4, 2)), TOKENS)


def swap(model: Any, h: Tensor) -> Tensor:
    """Each buffer is assigned; one gets the other's old value, which backward reads as well."""
    out = h * model.mean
    model.last, model.mean = model.mean, 0.9 * model.mean + h.detach().abs().mean(0)
    return out + model.last


def in_place(model: Any, h: Tensor) -> Tensor:
    model.mean[1:].add_(h.detach()[0, 1:])
    model.last.copy_(model.mean).mul_(2)
    return h * model.last


def last_of_all(model: Any, h: Tensor) -> Tensor:
    out = h * 2
    model.mean[1:].add_(h.detach()[0, 1:])
    return out


def old_value(model: Any, h: Tensor) -> tuple[Tensor, Tensor]:
    old, model.mean = model.mean, model.mean * 2
    return h * model.mean, old


@pytest.mark.parametrize("then", [swap, in_place, last_of_all, old_value])
def test_buffers_that_forward_changes(then: Callable[[Any, Tensor], Any]) -> None:
    agrees(Plain(then), X)


def test_an_input_that_forward_changes() -> None:
    class Model(nn.Linear):
        def forward(self, input: Tensor) -> Any:
            out = super().forward(input * 2)
            input.add_(1)
            input[0].zero_()
            return out, input

    agrees(Model(4, 4), X.clone())


def test_relu_in_place() -> None:
    agrees(nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.Dropout(0.5, inplace=True)), X)


def test_convolutions_keep_the_strides_of_their_weights() -> None:
    layers: Any = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 3))
    images = torch.randn(2, 3, 8, 8)
    agrees(layers, images)
    agrees(layers.to(memory_format=torch.channels_last), images.to(memory_format=torch.channels_last))
    agrees(copy.deepcopy(layers).to(memory_format=torch.channels_last), images)


def test_gradients_that_are_one_tensor_are_copied() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Parameter(torch.randn(4, 4)) for _ in range(3))

        def forward(self) -> Any:
            return self.a + self.b, self.c.t(), self.a

    agrees(Heads())


def test_gradients_lie_in_memory_as_their_parameters_do() -> None:
    class Crossed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.crossed, self.summed = nn.Parameter(torch.randn(4, 2).t()), nn.Parameter(torch.randn(2, 4))

        def forward(self, x: Tensor) -> Any:
            return x * 2 * self.crossed, self.summed.sum()

    agrees(Crossed(), X)


def test_an_expanded_input_and_one_that_is_no_leaf() -> None:
    agrees(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), X[:1].expand(3, 4))
    captured = capture(nn.Linear(4, 4), (X.clone().requires_grad_() * 2,), {})
    assert captured.outputs[-1] == Output("input_gradient", index=0)


def test_memory_under_two_names_must_not_change() -> None:
    model: Any = Plain(in_place)
    model.last = model.mean[:]
    with pytest.raises(CaptureError, match="buffer mean in place, which shares its memory with buffer last"):
        capture(model, (X,), {})
