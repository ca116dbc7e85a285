"""A module that shares everything with another one except its forward.

    proxy = ModuleProxy(model)    proxy.state_dict(), proxy.to(...), proxy.train(), proxy.config: model's
                                  isinstance(proxy, type(model)); inspect.signature(proxy.forward) is model.forward's

Parameters, buffers and submodules are the same dictionaries, so names have no prefix. Libraries look at the class and
at forward's signature to find out how to call and save a model.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch import nn

SHARED = (
    "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_is_full_backward_hook",
    "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",  # each module runs its own
)  # fmt: skip
# Python looks for these in the class, not in the object: a sequence of modules stays one.
SPECIAL = ("__len__", "__getitem__", "__setitem__", "__delitem__", "__iter__", "__contains__")
LOSS_NAMES = ("loss", "loss_fn", "criterion", "memgraph_loss")  # the first that the module does not have


class ClassProxy:
    """An object whose `__class__`, and so `isinstance`, is that of its `_module`; `type()` is its own.

    A separate class, since `super()` without arguments fails in a class that defines `__class__`.
    """

    @property
    def __class__(self) -> Any:
        module = self.__dict__.get("_module")  # missing while a copy is being filled
        return type(self) if module is None else module.__class__

    @__class__.setter
    def __class__(self, kind: Any) -> None:  # a parametrization gives its module another class
        self.__dict__["_module"].__class__ = kind


class ModuleProxy(ClassProxy, nn.Module):
    """Everything of `module` but its forward and the hooks around it."""

    _module: nn.Module

    def __new__(cls, module: nn.Module, *others: Any) -> Self:
        kind: Any = cls
        proxy: Self = object.__new__(_class_for(kind, module))
        return proxy

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
        if name == "_module":  # missing while a copy is being filled
            raise AttributeError(name)
        own = getattr(type(self), name, None)
        return own.__get__(self) if isinstance(own, property) else getattr(self._module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        own = getattr(type(self), name, None)
        if isinstance(own, property) and own.fset is None:
            raise AttributeError(
                f"{name} is a property of the compiled module itself: set it on the module that was given to "
                "memgraph.compile, which forward reads"
            )
        # A method of this object would create a reference cycle on the other.
        if name in self.__dict__ or name in dir(type(self)) or getattr(value, "__self__", None) is self:
            object.__setattr__(self, name, value)
        else:
            setattr(self._module, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__:
            object.__delattr__(self, name)
        else:
            delattr(self._module, name)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield this object, and what the module has beneath it."""
        yield prefix, self
        for path, part in self._module.named_modules(memo, prefix, remove_duplicate):
            if part is not self._module:
                yield path, part

    def _get_name(self) -> str:
        """Return the module's own name: transformers' Trainer looks it up to find out what the model is."""
        return self._module._get_name()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._module!r})"

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


def _class_for(kind: Any, module: nn.Module) -> type[Any]:
    """Return a class of the same name, with the special methods of `module` and its forward's signature."""
    methods: dict[str, Any] = {
        name: functools.partialmethod(_call, name) for name in SPECIAL if hasattr(type(module), name)
    }
    if "forward" in dir(kind):
        methods["forward"] = _with_signature(kind.forward, module)
    return type(kind.__name__, (kind,), methods | {"__module__": kind.__module__})


def _with_signature(forward: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    """Return `forward` with the signature of `module.forward`, and its own keyword-only parameters (`target`)."""

    @functools.wraps(forward)
    def signed(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    try:
        taken = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):  # it is written in C
        return signed
    own = [p for p in inspect.signature(forward).parameters.values() if p.kind is p.KEYWORD_ONLY]
    inner = [p for p in taken if p.name not in {q.name for q in own}]
    named = [p for p in inner if p.kind is not p.VAR_KEYWORD]
    self_parameter = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    positional = [p for p in (self_parameter, *named) if p.kind is p.POSITIONAL_ONLY]
    others = [p for p in named if p.kind is not p.POSITIONAL_ONLY]
    signed.__signature__ = inspect.Signature([*positional, *others, *own, *inner[len(named) :]])  # type: ignore[attr-defined]
    return signed


def _call(shared: ModuleProxy, name: str, *args: Any) -> Any:
    return getattr(shared._module, name)(*args)


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the innermost module of proxies."""
    while isinstance(module, ModuleProxy):
        module = module._module
    return module


def all_submodules(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return all submodules with their paths, and the modules inside of proxies."""
    parts = list(module.named_modules())
    while isinstance(module, ModuleProxy):
        module = module._module
        parts.append(("", module))
    return parts


def _loss_of(value: Any, loss: Any) -> Any:
    """Return the value of a loss.

    Raises:
        TypeError: it is None, as that of a function without a `return`.
    """
    if value is None:
        name = getattr(loss, "__qualname__", type(loss).__name__)
        raise TypeError(f"loss= ({name}) returned None, and has to return a tensor: is its `return` missing?")
    return value


class WithLoss(ModuleProxy):
    """A module that returns `loss(module(*args, **kwargs), target)`, or `loss(module(...))` without a target.

    A loss that is a module is one of its submodules: its parameters are trained, and its attributes are written.
    """

    def __init__(self, module: nn.Module, loss: Callable[..., Any]) -> None:
        super().__init__(module)
        self.__dict__["_loss"] = loss
        path = self.__dict__["_path"] = next(name for name in LOSS_NAMES if not hasattr(module, name))
        self.__dict__[path] = loss

    def __reduce__(self) -> Any:
        return WithLoss, (self._module, self._loss)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        memo = set() if memo is None else memo
        yield from super().named_modules(memo, prefix, remove_duplicate)
        if isinstance(self._loss, nn.Module):
            path = f"{prefix}.{self._path}" if prefix else self._path
            yield from self._loss.named_modules(memo, path, remove_duplicate)

    def forward(self, *args: Any, target: Any = None, **kwargs: Any) -> Any:
        result = self._module(*args, **kwargs)
        if target is not None:
            return _loss_of(self._loss(result, target), self._loss)
        try:
            return _loss_of(self._loss(result), self._loss)
        except TypeError as error:
            error.add_note("loss= is a part of the compiled module, and got its outputs alone: call it with target=...")
            raise
