"""Modules that are no submodules, what containers of a file lead to, and which tensor a parameter is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from copy import copy
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .way import Settings, of, on_module, prepared

NOW: dict[str, Any] = {}  # the module, or what leads to it


class Beside(nn.Module):
    """Has state of several kinds."""

    scale_buffer: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.settings = 2, SimpleNamespace(scale=2)
        self.register_buffer("scale_buffer", torch.tensor(2.0))
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.dropout(x * self.scale * self.settings.scale * self.scale_buffer)
        return y if self.training else 2 * y

    def counting(self, x: Tensor) -> Tensor:
        self.scale += 1
        return x * self.scale

    def averaging(self, x: Tensor) -> Tensor:
        self.scale_buffer = self.scale_buffer * 0.9 + x.detach().mean()
        return x * self.scale_buffer

    def hook(self, _module: nn.Module, _args: object, y: Tensor) -> Tensor:
        return self(y)


class Derived(Settings):
    """Has the attribute of its base."""


def beside(change: Callable[[Beside], Any], method: str = "forward") -> Any:
    """Return a way that calls a method of a module which an attribute leads to."""

    def prepare(module: Any) -> None:
        NOW["beside"] = Beside()
        module.function = getattr(NOW["beside"], method)

    def changed() -> None:
        change(NOW["beside"])

    return prepared(lambda m, x: m.function(x), prepare), changed


@of("modules beside")
def _() -> Any:
    """an attribute behind a bound method"""
    return beside(lambda it: setattr(it, "scale", 3))


@of("modules beside")
def _() -> Any:
    """a buffer that is replaced"""
    return beside(lambda it: setattr(it, "scale_buffer", torch.tensor(3.0)))


@of("modules beside")
def _() -> Any:
    """an attribute of an object there"""
    return beside(lambda it: setattr(it.settings, "scale", 3))


@of("modules beside")
def _() -> Any:
    """`eval()`"""
    return beside(lambda it: it.eval())


@of("modules beside")
def _() -> Any:
    """the rate of a dropout layer there"""
    return beside(lambda it: setattr(it.dropout, "p", 1.0))


@of("modules beside")
def _() -> Any:
    """a submodule that is replaced"""
    return beside(lambda it: setattr(it, "dropout", nn.Tanh()))


@of("modules beside")
def _() -> Any:
    """a number that it counts"""
    return beside(lambda it: None, "counting")


@of("modules beside")
def _() -> Any:
    """a buffer that it assigns"""
    return beside(lambda it: None, "averaging")


@of("modules beside")
def _() -> Any:
    """an attribute behind a hook that is its method"""

    def prepare(module: Any) -> None:
        NOW["beside"] = Beside()
        module.linear.register_forward_hook(NOW["beside"].hook)

    return prepared(lambda m, x: x, prepare), lambda: setattr(NOW["beside"], "scale", 3)


@of("containers of a file")
def _() -> Any:
    """an attribute behind a bound method"""
    NOW["settings"] = Settings()
    NOW["function"] = NOW["settings"].doubled
    return lambda m, x: x * NOW["function"](), lambda: setattr(NOW["settings"], "scale", 3)


@of("containers of a file")
def _() -> Any:
    """an attribute of the class of an object"""
    NOW["object"] = copy(Derived())
    del NOW["object"].scale

    def change() -> Callable[[], None]:
        Settings.scale = 3
        return lambda: setattr(Settings, "scale", 2)

    return lambda m, x: x * NOW["object"].scale, change


@of("containers of a file")
def _() -> Any:
    """the default of a defaultdict in an attribute"""
    then = prepared(lambda m, x: x * m.table["a"] if not m.table.clear() else x, keep_table)
    return then, on_module(lambda m: setattr(m.table, "default_factory", lambda: 3))


def keep_table(module: Any) -> None:
    module.table = defaultdict(lambda: 2)


@of("tensors elsewhere")
def _() -> Any:
    """the gradient of a tensor that is no parameter"""
    leaf = torch.ones((), requires_grad=True)
    return (
        lambda m, x: x * (2 if leaf.grad is None else leaf.grad),
        lambda: setattr(leaf, "grad", torch.tensor(3.0)),
    )


@of("tensors elsewhere")
def _() -> Any:
    """`id(parameter)` in a set"""
    then = prepared(
        lambda m, x: x * (2 if id(m.linear.weight) in m.known else 3),
        lambda m: setattr(m, "known", {id(m.linear.weight)}),
    )
    return then, on_module(lambda m: [m.known.clear(), None][1])


@of("tensors elsewhere")
def _() -> Any:
    """a parameter in a set"""
    then = prepared(
        lambda m, x: x * (2 if m.linear.weight in m.known else 3),
        lambda m: setattr(m, "known", {m.linear.weight}),
    )
    return then, lambda: None


@of("tensors elsewhere")
def _() -> Any:
    """a function of torch that is replaced by one around it"""
    plain = F.layer_norm

    def change() -> Callable[[], None]:
        F.layer_norm = lambda *args: plain(*args) * 3
        return lambda: setattr(F, "layer_norm", plain)

    return lambda m, x: F.layer_norm(x, (8,)), change
