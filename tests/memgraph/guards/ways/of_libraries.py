"""State that forward reads through torch, Python's library and objects of classes that hide it."""

from __future__ import annotations

import functools
import logging
import random
import string
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import networkx
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .way import Settings, of, prepared, setting

LOG = logging.getLogger("a.way")
OWN, OF_NUMPY = random.Random(0), np.random.default_rng(0)
WEAK_TARGET = Settings()
WEAK = weakref.ref(WEAK_TARGET)
SETTINGS = Settings()


class Config:
    """Finds its attributes in a dict."""

    def __init__(self, content: dict[str, Any]) -> None:
        inside = {key: Config(value) if isinstance(value, dict) else value for key, value in content.items()}
        object.__setattr__(self, "_content", inside)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.__dict__["_content"][name]

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__["_content"][name] = value


CONFIG = Config({"model": {"block": {"scale": 2}}})


class Registry:
    kept: Registry | None = None

    def __init__(self) -> None:
        self.scale = 2

    @classmethod
    def get(cls) -> Registry:
        if cls.kept is None:
            cls.kept = Registry()
        return cls.kept


@functools.lru_cache
def settings() -> Settings:
    return Settings()


class Hook:
    """A hook that is an object."""

    def __init__(self) -> None:
        self.by = 2.0

    def __call__(self, module: nn.Module, arguments: Any, result: Tensor) -> Tensor:
        return result * self.by


def by_table(table: dict[str, float], module: nn.Module, arguments: Any, result: Tensor) -> Tensor:
    return result * table["by"]


def patched(kind: type[nn.Module]) -> Callable[[], Callable[[], None]]:
    plain: Any = kind.forward

    def forward(self: Any, x: Tensor) -> Any:
        return plain(self, x) * 3

    return setting(kind, "forward", forward)


@of("libraries")
def _() -> Any:
    """a configuration that hides its attributes, three deep"""
    CONFIG.model.block.scale = 2
    return lambda m, x: x * CONFIG.model.block.scale, lambda: setattr(CONFIG.model.block, "scale", 5)


@of("libraries")
def _() -> Any:
    """a singleton that a class method returns"""
    Registry.get().scale = 2
    return lambda m, x: x * Registry.get().scale, lambda: setattr(Registry.get(), "scale", 5)


@of("libraries")
def _() -> Any:
    """a singleton that the first call makes"""
    Registry.kept = None
    return lambda m, x: x * Registry.get().scale, lambda: setattr(Registry.get(), "scale", 5)


@of("libraries")
def _() -> Any:
    """an object that a cached function returns"""
    settings().scale = 2
    return lambda m, x: x * settings().scale, lambda: setattr(settings(), "scale", 5)


@of("libraries")
def _() -> Any:
    """a forward hook that is an object"""
    hook = Hook()
    then = prepared(lambda m, x: m.linear(x), lambda m: m.linear.register_forward_hook(hook))
    return then, lambda: setattr(hook, "by", 5.0)


@of("libraries")
def _() -> Any:
    """a forward hook that is a partial"""
    table = {"by": 2.0}
    then = prepared(
        lambda m, x: m.linear(x), lambda m: m.linear.register_forward_hook(functools.partial(by_table, table))
    )  # fmt: skip
    return then, lambda: table.update(by=5.0)


@of("libraries")
def _() -> Any:
    """`forward` of `nn.Linear` itself, replaced"""
    return lambda m, x: m.linear(x), patched(nn.Linear)


@of("libraries")
def _() -> Any:
    """a function of torch that a layer of torch calls, replaced"""
    then = prepared(lambda m, x: m.held(x), lambda m: setattr(m, "held", nn.SiLU()))
    return then, setting(F, "silu", lambda x, inplace=False: x * 3)


@of("libraries")
def _() -> Any:
    """a method of `torch.Tensor`, replaced"""

    def change() -> Any:
        torch.Tensor.relu = lambda self: self * 3  # type: ignore[method-assign]
        return lambda: delattr(torch.Tensor, "relu")

    return lambda m, x: x.relu(), change


@of("libraries")
def _() -> Any:
    """the level of a logger"""
    LOG.setLevel(logging.WARNING)
    return lambda m, x: x * (3 if LOG.isEnabledFor(logging.DEBUG) else 2), lambda: LOG.setLevel(logging.DEBUG)


@of("libraries")
def _() -> Any:
    """`sys.argv`"""

    def change() -> Any:
        sys.argv.append("--fast")
        return lambda: sys.argv.remove("--fast")

    return lambda m, x: x * (3 if "--fast" in sys.argv else 2), change


@of("libraries")
def _() -> Any:
    """a Python module that a function closes over"""
    file = types.ModuleType("closed_over")
    file.by = 2  # type: ignore[attr-defined]
    return lambda m, x: x * file.by, lambda: setattr(file, "by", 5)


@of("libraries")
def _() -> Any:
    """`__dict__` of an object, replaced"""
    SETTINGS.scale = 2
    return lambda m, x: x * SETTINGS.scale, lambda: setattr(SETTINGS, "__dict__", {"scale": 5})


@of("libraries")
def _() -> Any:
    """an object behind a weak reference"""
    WEAK_TARGET.scale = 2

    def then(m: Any, x: Tensor) -> Tensor:
        target = WEAK()
        assert target is not None
        return x * target.scale

    return then, lambda: setattr(WEAK_TARGET, "scale", 5)


@of("libraries")
def _() -> Any:
    """a `random.Random` of a global"""
    return lambda m, x: x * OWN.choice([1, 2, 3]), lambda: None


@of("libraries")
def _() -> Any:
    """a generator of numpy of a global"""
    return lambda m, x: x * float(OF_NUMPY.random()), lambda: None


PROXY = weakref.proxy(WEAK_TARGET)
MEMBERS = [Settings(2), Settings(3)]
WEAK_MEMBERS = weakref.WeakSet(MEMBERS)


@of("libraries")
def _() -> Any:
    """an object behind a `weakref.proxy`"""
    WEAK_TARGET.scale = 2
    return lambda m, x: x * PROXY.scale, lambda: setattr(WEAK_TARGET, "scale", 5)


@of("libraries")
def _() -> Any:
    """an object in a `weakref.WeakSet`"""
    MEMBERS[0].scale = 2
    return lambda m, x: x * sum(each.scale for each in WEAK_MEMBERS), lambda: setattr(MEMBERS[0], "scale", 7)


@functools.lru_cache
def drawn(count: int) -> Tensor:
    return torch.randn(count)


@of("libraries")
def _() -> Any:
    """random numbers that a cached function keeps"""
    drawn.cache_clear()
    return lambda m, x: x * drawn(8), lambda: None


TEMPLATE = string.Template("2")


@of("libraries")
def _() -> Any:
    """an object of Python's library that its own code reads"""
    return lambda m, x: x * int(TEMPLATE.substitute()), setting(TEMPLATE, "template", "3")


@of("libraries")
def _() -> Any:
    """a graph of networkx"""
    graph = networkx.path_graph(3)
    return lambda m, x: x * graph.number_of_nodes(), lambda: graph.add_edge(0, 7)


@of("libraries")
def _() -> Any:
    """a function of numpy, replaced"""
    return lambda m, x: x * float(np.mean([2.0])), setting(np, "mean", lambda values: 3.0)
