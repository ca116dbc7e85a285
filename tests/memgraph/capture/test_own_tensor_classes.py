"""Tensors of a class of one's own are refused by name: a plain one would stand for them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import memgraph


class Quantized(nn.Parameter): ...


class Marked(Tensor): ...


def test_a_parameter_of_a_class_of_ones_own_is_refused() -> None:
    net = nn.Linear(4, 4)
    net.weight = Quantized(net.weight.detach().clone())
    with pytest.raises(memgraph.CaptureError, match=r"^parameter weight is of the class Quantized, but a plain tensor"):
        memgraph.compile(net, "1GB")


def test_an_argument_of_such_a_class_is_refused() -> None:
    model = memgraph.compile(nn.Linear(4, 4), "1GB")
    with pytest.raises(memgraph.CaptureError, match=r"input 0 is of the class Marked, .*: make it a plain tensor"):
        model(torch.randn(2, 4).as_subclass(Marked))


def test_a_conjugated_argument_is_refused_after_a_plain_one() -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, z: Tensor) -> Tensor:
            return self.layer(z.real) + self.layer(z.imag)

    model, z = memgraph.compile(Parts(), "1GB"), torch.randn(2, 4, dtype=torch.complex64)
    model(z).sum().backward()
    with pytest.raises(memgraph.CaptureError, match="lazily conjugated"):
        model(z.conj())
