"""A method, an attribute or an entry that someone replaces in an installed package, or around it, takes effect."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import memgraph

SOURCE = """
import enum
import torch
from torch import nn

class Mode(enum.Enum):
    PLAIN, OTHER = 1, 5

class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2

class Registry:
    by = 2
    mode = Mode.PLAIN
    names = {"a": {"b"}}

    def __init__(self):
        self.local = {}

class Constant(nn.Module):
    @torch.no_grad()
    def forward(self, x):
        return x * 0 + 3

class Base(nn.Module):
    by = 2

    @property
    def factor(self):
        return 3

    @classmethod
    def shift(cls):
        return 1

class Layer(Base):
    def __init__(self):
        super().__init__()
        self.linear, self.constant = nn.Linear(8, 8), Constant()

    def forward(self, x):
        y = Twice.apply(self.linear(x)) * self.constant(x) * REGISTRY.local.get("scale", 1)
        y = y * REGISTRY.mode.value * len(REGISTRY.names["a"])
        return (y * self.by * self.factor * REGISTRY.by + self.shift()).square().sum()

REGISTRY = Registry()
"""


def without_grad(package: Any) -> None:
    forward = package.Constant.forward
    wrapped = forward.__code__.co_freevars.index("func")
    forward.__closure__[wrapped].cell_contents = lambda self, x: x * 0 + 5


def called(self: nn.Module, x: Any) -> Any:
    return nn.Module.__call__(self, x) * 2


CHANGES: dict[str, Callable[[Any], object]] = {
    "a static method": lambda package: setattr(package.Twice, "forward", staticmethod(lambda ctx, x: x * 5)),
    "a backward": lambda package: setattr(package.Twice, "backward", staticmethod(lambda ctx, grad: grad * 5)),
    "a class method": lambda package: setattr(package.Base, "shift", classmethod(lambda cls: 5)),
    "a property": lambda package: setattr(package.Base, "factor", property(lambda self: 5)),
    "a property that hides its base's": lambda package: setattr(package.Layer, "factor", property(lambda self: 5)),
    "a number that hides its base's": lambda package: setattr(package.Layer, "by", 5),
    "a number that hides its class's": lambda package: setattr(package.REGISTRY, "by", 5),
    "a member of an enum": lambda package: setattr(package.Registry, "mode", package.Mode.OTHER),
    "an entry of a set in a dict": lambda package: package.Registry.names["a"].add("c"),
    "the first entry of a registry": lambda package: package.REGISTRY.local.update(scale=5),
    "what a decorator of torch's wraps": without_grad,
    "__call__ of a part": lambda package: setattr(package.Constant, "__call__", called),
}


@pytest.fixture
def package() -> Iterator[types.ModuleType]:
    package = types.ModuleType("installed_package")
    package.__file__ = "/lib/site-packages/installed_package/__init__.py"
    exec(compile(SOURCE, package.__file__, "exec"), vars(package))
    sys.modules["installed_package"] = package
    yield package
    del sys.modules["installed_package"]


@pytest.mark.parametrize("what", CHANGES)
def test_what_is_replaced_takes_effect(what: str, package: types.ModuleType, planned: list[str]) -> None:
    module, x = vars(package)["Layer"](), torch.ones(4, 8)
    compiled = memgraph.compile(module, "1GB")
    for step in range(4):
        if step == 2:
            CHANGES[what](package)
        found = []
        for each in (compiled, module):
            module.zero_grad()
            loss = each(x)
            loss.backward()
            found.append([loss.detach(), module.linear.weight.grad.clone()])
        assert all(map(torch.equal, *found)), step
    assert len(planned) == 2
