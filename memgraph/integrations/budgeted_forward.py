"""The forward of a module under a budget, in place: the module stays what it is for everything else.

model.forward = BudgetedForward(model, "8GB", {})   ->   model(x) runs a planned step, and is the same module
model.scale = 2.0                                   ->   the next step is one with that scale
model.generate(ids)                                 ->   runs the plain forward
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Set
from functools import update_wrapper
from typing import Any

import torch
from torch import nn

from ..api.compiled_module import CompiledModule
from ..api.compiler import compile
from ..capture.call.changed_arguments import ChangedArgumentError
from ..options.compile_options import Budget
from ..system.frames import is_inside
from ..system.user_warning import warn_user

REPLACED = frozenset({"forward", "_original_forward"})  # here, and by accelerate
STATE_HOOKS = ("_state_dict_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")


class BudgetedForward:
    """Calls a compiled module that shares everything with `model` but its hooks, which run around this forward.

    Args:
        own: returns the attributes that the compiled module does not share, before each call.

    Attributes:
        compiled: the compiled module; None before the first call, and after another optimizer was given.
    """

    def __init__(
        self, model: nn.Module, budget: Budget, options: dict[str, Any], own: Callable[[], dict[str, Any]] = dict
    ) -> None:
        self._model, self._budget, self._options = model, budget, options
        self._plain = model.forward
        self._shared, self._own = without_hooks(model), own
        self._optimizer: torch.optim.Optimizer | None = None
        self._changed = set[type]()
        self.compiled: CompiledModule | None = None
        update_wrapper(self, model.forward)  # whoever asks for arguments of forward sees those of the model

    def count(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Count the states of an optimizer from the next call on."""
        if optimizer is not self._optimizer:
            self._optimizer, self.compiled = optimizer, None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() and self._makes_tokens(args, kwargs):
            return self._plain(*args, **kwargs)
        own = self._own()
        follow(self._shared, self._model, own.keys() | REPLACED)
        vars(self._shared).update(own)
        if self.compiled is None:
            self.compiled = compile(self._shared, self._budget, optimizer=self._optimizer, **self._options)
        self.compiled.training = self._model.training
        try:
            return self.compiled(*args, **kwargs)
        except ChangedArgumentError as error:
            if torch.is_grad_enabled():
                raise
            self._changed.add(error.kind)
            warn_user(f"forward changes a {error.kind.__name__}: calls with one run outside of the budget")
            return self._plain(*args, **kwargs)

    def _makes_tokens(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return True for a call in `generate`, where each has another shape, or with a cache that forward fills."""
        filled = any(type(value) in self._changed for value in (*args, *kwargs.values()))
        return filled or is_inside("generate", self._model)


def without_hooks(model: nn.Module) -> nn.Module:
    """Return a module that shares parameters, buffers and submodules with `model`, and has no hooks of its own."""
    shared = copy.copy(model)
    for name, value in vars(shared).items():
        if _runs_hooks(name) and isinstance(value, dict):
            shared.__dict__[name] = OrderedDict()
    return shared


def follow(shared: nn.Module, model: nn.Module, but: Set[str]) -> None:
    """Give a module all attributes that another has now, but for hooks and those named."""
    now = {name: value for name, value in vars(model).items() if not _runs_hooks(name) and name not in but}
    for name in [name for name in vars(shared) if name not in now and not _runs_hooks(name) and name not in but]:
        del shared.__dict__[name]
    vars(shared).update(now)


def _runs_hooks(name: str) -> bool:
    return name.endswith("_hooks") and name not in STATE_HOOKS
