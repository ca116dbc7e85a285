"""The forward of a module under a budget, in place: the module stays what it is for everything else.

budget = ModuleBudget("8GB", {})
budget.cover(model)                              ->   model(x) runs a planned step, and is the same module
model.scale = 2.0                                ->   the next step is one with that scale
model.forward = autocast(model.forward)          ->   the planned forward, in another one
model.forward = another; budget.cover(model)     ->   the other one is planned
model.generate(ids)                              ->   runs the plain forward

Trainers wrap forward, or put another in its place, when they like. So it is looked at before each step. One that says
that it wraps the planned forward stays around it; another is planned itself, and all that it calls are plain.

Attributes of a trainer that forward reads: a step depends on these, and not on all that changes in a trainer.

reads = TrainerReads(trainer)
module._trainer = reads;  module.forward(x)   # which reads self.current_epoch
reads.refreshed()   ->   {"current_epoch": 3}
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Set
from functools import update_wrapper
from inspect import signature
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ..api.compiled_module import CompiledModule
from ..api.compiler import compile
from ..capture.call.changed_arguments import ChangedArgumentError
from ..errors import BudgetError, NoPlanError, UnplannedError
from ..guards.wrappers import refuse_wrapped
from ..optim.trial_copy import UntriedUpdateError
from ..options.argument_rules import check_argument
from ..options.compile_options import Budget
from ..report.report import Report
from ..system.byte_sizes import nbytes_within
from ..system.frames import is_inside
from ..system.user_warning import warn_user
from ..tensors.loss_outputs import select_all

REPLACED = frozenset({"forward", "_original_forward"})  # here, and by accelerate
STATE_HOOKS = ("_state_dict_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")


class ModuleBudget:
    """Plans the calls of one module at a time.

    The compiled module shares everything with the module but its hooks, which run around its forward.

    Attributes:
        compiled: the compiled module; None before the first call, and after forward or the optimizer was replaced.
        calls, trained: the number of calls that arrived here since `begin_step`, and of those with gradients.
    """

    def __init__(self, budget: Budget, options: dict[str, Any]) -> None:
        """
        Raises:
            TypeError, ValueError: there is no such option, or the budget can't be read.
        """
        known = signature(compile).parameters.keys() - {"model", "budget"}
        if unknown := sorted(options.keys() - known):
            raise TypeError(f"{unknown[0]}= is no option of memgraph.compile, which has {', '.join(sorted(known))}")
        if isinstance(check_argument("budget", budget), str):
            nbytes_within(str(budget), 1 << 62, "any device")
        self._budget, self._options = budget, options
        self._optimizer: torch.optim.Optimizer | None = None
        self._uncounted: torch.optim.Optimizer | None = None  # which can't be tried
        self._changed = set[type]()
        self._covering: BudgetedForward | None = None
        self.compiled: CompiledModule | None = None
        self.calls = self.trained = 0

    def cover(self, model: nn.Module, own: Callable[[], dict[str, Any]] = dict) -> None:
        """Plan what forward of `model` is now, in the place of what was planned until now.

        Args:
            own: returns the attributes that the compiled module does not share, before each call.

        Raises:
            UnplannedError: torch.compile, or another library, runs the calls of `model`, or of a part of it.
        """
        covering = self._covering
        if covering is not None and CURRENT.get(model) is covering and covering in _wrapped(model.forward):
            return
        refuse_compiled(model)
        for path, part in model.named_modules():
            refuse_wrapped(f"model.{path}" if path else "model", part)
        if covering is not None and covering.model is not model:
            self.uncover()
        self.compiled, self._covering = None, BudgetedForward(self, model, own)
        CURRENT[model] = model.forward = self._covering

    def uncover(self) -> None:
        """Give the module its own forward again; the plan stays readable."""
        covering = self._covering
        self._covering = None
        if covering is not None and CURRENT.get(covering.model) is covering:
            model, plain = covering.model, covering.plain
            del CURRENT[model]
            if vars(model).get("forward") is covering:
                del model.forward
                if not _is_of_class(plain, model):
                    model.forward = plain

    def count(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Count the states of an optimizer from the next call on."""
        if optimizer is not self._optimizer and optimizer is not self._uncounted:
            self._optimizer, self.compiled = optimizer, None

    def default(self, budget: Budget) -> None:
        """Take a budget where none was given."""
        if self._budget is None and self.compiled is None:
            self._budget = budget

    @property
    def report(self) -> Report | None:
        """The report of the latest training step; None before the first call."""
        try:
            return None if self.compiled is None else self.compiled.plan
        except NoPlanError:
            return None

    @property
    def scalars(self) -> dict[str, float]:
        """The latest plan for a log of numbers: megabytes, and shares of the step's time; empty before the first."""
        if self.report is None:
            return {}
        report = self.report
        return {
            "memory_peak_mb": round((report.measured or report.peak) / 1e6, 3),
            "memory_forecast_mb": round(report.peak / 1e6, 3),
            "memory_budget_mb": round(report.budget / 1e6, 3),
            "memory_overhead": round(report.longer, 4),
        }

    def begin_step(self, model: nn.Module, own: Callable[[], dict[str, Any]] = dict) -> None:
        """Cover the module, whose step is about to begin."""
        self.cover(model, own)
        self.calls = self.trained = 0

    def end_step(self, seen: int) -> None:
        """End a step in which so many calls arrived here, behind its backward.

        Raises:
            UnplannedError: none did.
        """
        covering = self._covering
        if covering is None or seen:
            self.calls = self.trained = 0
            return
        kind, now = type(covering.model).__name__, covering.model.forward
        why = "a part of it, or another module, was called"
        if now is not covering:
            code = getattr(getattr(now, "__func__", now), "__code__", None)
            place = f", {code.co_filename}:{code.co_firstlineno}," if code else ""
            why = f"{getattr(now, '__qualname__', type(now).__name__)}{place} took the place of its forward"
        raise UnplannedError(
            f"this training step ran outside of the budget of {self._budget}: no call of the {kind} was planned, since "
            f"{why}. Let each step call the {kind} itself, and replace its forward before "
            "the step begins; or compile the module that is called, with memgraph.compile"
        )

    def run(self, forward: BudgetedForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call of the covered module, planned."""
        self.calls, self.trained = self.calls + 1, self.trained + torch.is_grad_enabled()
        return self._run(forward, args, kwargs)

    def _run(self, forward: BudgetedForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled() and self._makes_tokens(forward.model, args, kwargs):
            return forward.plain(*args, **kwargs)
        own = forward.own()
        follow(forward.shared, forward.model, own.keys() | REPLACED)
        vars(forward.shared).update(own)
        try:
            if self.compiled is None:
                self.compiled = compile(forward.shared, self._budget, optimizer=self._optimizer, **self._options)
                if forward.is_of_another:
                    self.compiled._plan_outputs(select_all)
            self.compiled.training = forward.model.training
            return self.compiled(*args, **kwargs)
        except BudgetError:
            if not forward.is_of_another:
                raise
            forward.is_of_another = False
            self.compiled = None
            return self._run(forward, args, kwargs)
        except UntriedUpdateError:
            self._leave_uncounted()
            return self._run(forward, args, kwargs)
        except ChangedArgumentError as error:
            if torch.is_grad_enabled():
                raise
            self._changed.add(error.kind)
            warn_user(f"forward changes a {error.kind.__name__}: calls with one run outside of the budget")
            return forward.plain(*args, **kwargs)

    def _leave_uncounted(self) -> None:
        """Plan without the optimizer, and say so."""
        kind = type(self._optimizer)
        warn_user(
            f"{kind.__module__}.{kind.__name__} steps on its own parameters alone, so its states and its update are "
            f"not counted: leave room for them in the budget of {self._budget}, or take an optimizer of torch or of "
            "torchao (as adamw_torch_8bit), which is counted"
        )
        self._optimizer, self.compiled, self._uncounted = None, None, self._optimizer

    def _makes_tokens(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return True for a call in `generate`, where each has another shape, or with a cache that forward fills."""
        filled = any(type(value) in self._changed for value in (*args, *kwargs.values()))
        return filled or is_inside("generate", model)


class BudgetedForward:
    """A forward that is planned while it is the current one of its module, and plain later on.

    Attributes:
        plain: the forward that was in its place.
        shared: the module that is compiled.
        is_of_another: `plain` is not that of the module's class.  Who makes a forward of their own makes a loss of any
            of its outputs, so all are planned for, if that fits.
    """

    def __init__(self, budget: ModuleBudget, model: nn.Module, own: Callable[[], dict[str, Any]]) -> None:
        found: Any = model.forward
        while isinstance(found, BudgetedForward):
            found = found.plain
        self.budget, self.model, self.own = budget, model, own
        self.plain: Callable[..., Any] = found
        self.shared = without_hooks(model)
        if not _is_of_class(found, model):
            is_method = isinstance(found, MethodType) and found.__self__ is model
            self.shared.__dict__["forward"] = MethodType(found.__func__, self.shared) if is_method else found
        else:
            self.shared.__dict__.pop("forward", None)
        self.is_of_another = not _is_of_class(found, model)
        update_wrapper(self, found)  # whoever asks for arguments of forward sees those of the model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if CURRENT.get(self.model) is self:
            return self.budget.run(self, args, kwargs)
        return self.plain(*args, **kwargs)


CURRENT: WeakKeyDictionary[nn.Module, BudgetedForward] = WeakKeyDictionary()


def _wrapped(forward: Any) -> Iterator[Any]:
    """Yield what a forward says that it wraps, from the outside in."""
    while forward is not None:
        yield forward
        forward = getattr(forward, "__wrapped__", None)


def _is_of_class(forward: Any, model: nn.Module) -> bool:
    """Return True for the forward that a module has of its class."""
    return isinstance(forward, MethodType) and forward.__self__ is model and forward.__func__ is type(model).forward


def refuse_compiled(model: nn.Module) -> None:
    """
    Raises:
        UnplannedError: torch.compile runs the calls of a module.
    """
    if isinstance(model, torch._dynamo.OptimizedModule) or model._compiled_call_impl is not None:
        raise UnplannedError(
            "torch.compile and a budget would both run the steps of the model: choose one. Give the trainer the plain "
            'model, and lower="inductor" to the budget for kernels of torch.compile'
        )


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


class TrainerReads:
    """Stands for a trainer in a module that is captured.

    It has no attributes but its slots. A captured step depends on the values that were read, and on no private slot.
    """

    __slots__ = ("__names", "__trainer", "_read_values")

    def __init__(self, trainer: Any) -> None:
        self.__trainer = trainer
        self.__names: dict[str, None] = {}
        self._read_values: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of whoever looks at this object, as the guards do
            raise AttributeError(name)
        if name in self._read_values:
            return self._read_values[name]
        value = getattr(self.__trainer, name)
        self.__names[name] = None
        return value

    def refreshed(self) -> dict[str, Any]:
        """Return the attributes that were read until now, as they are now; later reads get these."""
        self._read_values.clear()
        self._read_values.update((name, getattr(self.__trainer, name)) for name in self.__names)
        return self._read_values
