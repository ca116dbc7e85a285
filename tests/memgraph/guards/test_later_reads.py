"""A later capture may be the first to read something: what it reads counts as what the first one has read."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import memgraph

X = torch.linspace(-1, 1, 12).view(3, 4)


class Scaled(nn.Linear):
    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(Scaled(4, 4), nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.mlp(x)
        return result


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def is_same(model: Any, net: Any) -> bool:
    results = []
    for each in (model, net):
        torch.manual_seed(1)
        results.append(each(X))
    return torch.equal(*results)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "an attribute": lambda block: setattr(block.mlp[0], "scale", 3.0),
    "a number": lambda block: setattr(block.mlp[1], "p", 0.1),
    "eval": lambda block: block.eval(),
    "another layer": lambda block: block.mlp.__setitem__(1, nn.Tanh()),
    "a hook": lambda block: block.mlp[0].register_forward_hook(lambda module, args, out: 2 * out),
    "forward": lambda block: setattr(block.mlp[0], "forward", torch.tanh),
    "a parametrization": lambda block: parametrize.register_parametrization(block.mlp[0], "weight", nn.Tanh()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_in_a_part_that_was_added_after_the_first_call(change: str) -> None:
    torch.manual_seed(0)
    net = Blocks()
    model: Any = memgraph.compile(net, 1 << 30, time_limit=0)
    model(X).sum().backward()
    net.blocks.append(Block())
    assert is_same(model, net)
    CHANGES[change](net.blocks[1])
    assert is_same(model, net)


def test_what_is_in_a_parametrization() -> None:
    class Times(nn.Module):
        k = 1.0

        def forward(self, w: Tensor) -> Tensor:
            return w * self.k

    net: Any = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model: Any = memgraph.compile(net, 1 << 30, time_limit=0)
    model(X).sum().backward()
    parametrize.register_parametrization(net[0], "weight", Times())
    assert is_same(model, net)
    net[0].parametrizations.weight[0].k = 3.0
    assert is_same(model, net)


class Later(nn.Module):
    """From `phase` 1 on, a container or an object is read that has a submodule, or something else."""

    def __init__(self, held: Callable[[nn.Module], Any], take: Callable[[Any], Any]) -> None:
        super().__init__()
        self.a, self.b, self.phase = Scaled(4, 4), Scaled(4, 4), 0
        self.held, self.take = held(self.b), take

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        if self.phase >= 1:
            x = self.take(self.held)(x)
        return x


HELD: dict[str, tuple[Callable[[nn.Module], Any], Callable[[Any], Any]]] = {
    "a list": (lambda b: [b], lambda held: held[0]),
    "a dict": (lambda b: {"b": b}, lambda held: held["b"]),
    "a namespace": (lambda b: SimpleNamespace(b=b), lambda held: held.b),
}


@pytest.mark.parametrize("held", HELD)
def test_a_submodule_that_something_else_has_too(held: str) -> None:
    torch.manual_seed(0)
    net = Later(*HELD[held])
    model: Any = memgraph.compile(net, 1 << 30, time_limit=0)
    for net.phase in (0, 1):
        assert is_same(model, net)
    net.b.scale = 5.0
    assert is_same(model, net)
    net.b.register_forward_hook(lambda module, args, out: 2 * out)
    assert is_same(model, net)


class Settings:
    def __init__(self) -> None:
        self.scale, self.shift = 2.0, 1.0


class Phases(nn.Module):
    def __init__(self, held: Callable[[Any], Any], take: Callable[[Any], Any]) -> None:
        super().__init__()
        self.a, self.phase, self.settings = nn.Linear(4, 4), 0, Settings()
        self.held, self.take = held(self.settings), take

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        if self.phase >= 1:
            x = x * self.take(self.held).scale
        if self.phase >= 2:
            x = x + self.take(self.held).shift
        return x


OBJECTS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "an attribute": (lambda settings: settings, lambda held: held),
    "a list": (lambda settings: [settings], lambda held: held[0]),
    "a dict": (lambda settings: {"s": settings}, lambda held: held["s"]),
    "a namespace": (lambda settings: SimpleNamespace(s=settings), lambda held: held.s),
}


@pytest.mark.parametrize("held", OBJECTS)
def test_another_attribute_of_an_object_that_a_second_capture_has_read(held: str) -> None:
    torch.manual_seed(0)
    net = Phases(*OBJECTS[held])
    model: Any = memgraph.compile(net, 1 << 30, time_limit=0)
    for net.phase in (0, 1, 2):
        assert is_same(model, net)
    net.settings.shift = 7.0
    assert is_same(model, net)


HELPED = Scaled(4, 4)


def test_a_submodule_that_forward_reaches_by_a_global_alone() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.b = HELPED

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = HELPED(x)
            return found

    net = Net()
    model: Any = memgraph.compile(net, 1 << 30, time_limit=0)
    assert is_same(model, net)
    net.b.scale = 3.0
    assert is_same(model, net)
