"""A module that is another one, but for its forward.

    same = Shared(model)      same.state_dict(), same.to(...), same.train(), same.config: all of it is model's

Parameters, buffers and submodules are the very dictionaries of the other module, so names have no prefix and nothing is
held twice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn

SHARED = (
    "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_is_full_backward_hook",
    "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",  # of which a module around this one runs its own
)  # fmt: skip
# What Python looks for in the class and not in the object: a sequence of modules stays one.
SPECIAL = ("__len__", "__getitem__", "__setitem__", "__delitem__", "__iter__", "__contains__")


class Shared(nn.Module):
    """Everything of `module` but its forward and the hooks around it."""

    _module: nn.Module

    def __new__(cls, module: nn.Module, *others: Any) -> Self:
        names = tuple(name for name in SPECIAL if hasattr(type(module), name))
        kind: Any = cls
        made: Self = object.__new__(_with_special(kind, names))
        return made

    def __init__(self, module: nn.Module) -> None:
        self.__dict__["_module"] = module
        training = module.training
        super().__init__()
        module.training = training
        self.__dict__ |= {name: module.__dict__[name] for name in SHARED if name in module.__dict__}

    @property
    def training(self) -> bool:
        return self._module.training

    @training.setter
    def training(self, mode: bool) -> None:  # pyright: ignore[reportIncompatibleVariableOverride] # in torch, an attribute
        self._module.training = mode

    def __getattr__(self, name: str) -> Any:
        if name == "_module":  # not yet there while a copy or an unpickled object is being filled
            raise AttributeError(name)
        own = getattr(type(self), name, None)
        return own.__get__(self) if isinstance(own, property) else getattr(self._module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__ or name in dir(type(self)):
            object.__setattr__(self, name, value)
        else:
            setattr(self._module, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._module, name)

    def train(self, mode: bool = True) -> Self:
        self._module.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._module.load_state_dict(*args, **kwargs)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        self._module._apply(fn, recurse)
        return self


@functools.cache
def _with_special(kind: Any, names: tuple[str, ...]) -> type[Any]:
    """The class itself, or one of its name that hands these methods on to the module."""
    methods = {name: functools.partialmethod(_call, name) for name in names}
    return type(kind.__name__, (kind,), methods | {"__module__": kind.__module__}) if names else kind


def _call(shared: Shared, name: str, *args: Any) -> Any:
    return getattr(shared._module, name)(*args)


def plain(module: nn.Module) -> nn.Module:
    """The module that it stands for in the end."""
    while isinstance(module, Shared):
        module = module._module
    return module


def every_part(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """All submodules with their paths, and the module itself; with the one that it only stands for, if it does."""
    parts = list(module.named_modules())
    while isinstance(module, Shared):
        module = module._module
        parts.append(("", module))
    return parts


class WithLoss(Shared):
    """A module whose result is the loss of another's: `loss(module(*args, **kwargs), target)`, or `loss(module(...))`
    without a target."""

    def __init__(self, module: nn.Module, loss: Callable[..., Any]) -> None:
        super().__init__(module)
        self.__dict__["_loss"] = loss

    def __reduce__(self) -> Any:
        return WithLoss, (self._module, self._loss)

    def forward(self, *args: Any, target: Any = None, **kwargs: Any) -> Any:
        result = self._module(*args, **kwargs)
        return self._loss(result) if target is None else self._loss(result, target)
