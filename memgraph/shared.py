"""A module that is another one, but for its forward.

    same = Shared(model)      same.state_dict(), same.to(...), same.train(), same.config: all of it is model's

Parameters, buffers and submodules are the very dictionaries of the other module, so names have no prefix and nothing is
held twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn

SHARED = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_is_full_backward_hook")
OWN = ("_module",)


class Shared(nn.Module):
    """Everything of `module` but its forward and the hooks around it."""

    _module: nn.Module

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
    def training(self, mode: bool) -> None:
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


class WithLoss(Shared):
    """A module whose result is the loss of another's: `loss(module(*args, **kwargs), target)`, or `loss(module(...))`
    without a target."""

    def __init__(self, module: nn.Module, loss: Callable[..., Any]) -> None:
        super().__init__(module)
        self.__dict__["_loss"] = loss

    def __reduce__(self) -> Any:
        return type(self), (self._module, self._loss)

    def forward(self, *args: Any, target: Any = None, **kwargs: Any) -> Any:
        result = self._module(*args, **kwargs)
        return self._loss(result) if target is None else self._loss(result, target)
