"""Decide whether an optimizer updates each element independently, so that its step can run on any range of elements.

    AdamW                        ->   yes: each element depends on its own parameter, gradient and states
    AdamW(differentiable=True)   ->   no, with the reason
    a class of the user          ->   if the class says `pointwise = True`

torch's optimizers that do are a list; the tests show each of them bit-equal in windows.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, optim

from ..errors import UpdateError
from ..tensors.parameter_groups import parameter_groups

ELEMENTWISE = (
    *(optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad, optim.RMSprop, optim.Adamax),
    *(optim.NAdam, optim.RAdam, optim.Adadelta, optim.Rprop, optim.ASGD),
)
OURS = "_memgraph_step"
TORCHS = os.path.dirname(optim.__file__)
OPTIONS = ("differentiable", "capturable")  # with these no update runs in windows
EXACT_DTYPES = (torch.float32, torch.float64)  # results do not depend on which elements a kernel takes together


def is_exact(parameter: Tensor, on_host: bool = False) -> bool:
    """Return True if results do not depend on where an update of the parameter is split.

    A GPU's kernels compute each element in the same way. A CPU's take whole vectors of elements and the rest one by
    one, which rounds differently in low precision.
    """
    return parameter.dtype in EXACT_DTYPES or (parameter.device.type == "cuda" and not on_host)


def declared_elementwise(kind: type[optim.Optimizer]) -> bool:
    """Return True if the class is in the list, or says `pointwise = True` in its own body: a subclass may differ."""
    return has_torchs_step(kind) or vars(kind).get("pointwise") is True


def has_torchs_step(kind: type[optim.Optimizer]) -> bool:
    """Return True for a class of the list whose step was not replaced."""
    code = getattr(unhooked_step(kind), "__code__", None)
    return kind in ELEMENTWISE and code is not None and os.path.dirname(code.co_filename) == TORCHS


def is_elementwise(optimizer: optim.Optimizer) -> bool:
    """Return True if its update can run in windows, whatever its gradients."""
    return declared_elementwise(type(optimizer)) and not any(
        group.get(option) for group in optimizer.param_groups for option in OPTIONS
    )


def replaced_step(optimizer: optim.Optimizer) -> str | None:
    """Return why the step that the object itself has can't be run in windows, with what to do; None if it has none."""
    own = vars(optimizer).get("step")
    if own is None or hasattr(own, "_wrapped_by_lr_sched") or hasattr(own, OURS):
        return None
    return (
        f"the step of this {type(optimizer).__name__} was replaced on the object, and an update in windows runs that "
        "of the class: replace it after memgraph.compile"
    )


def option_reason(optimizer: optim.Optimizer, trained: Callable[[Tensor], bool]) -> str | None:
    """Return which option keeps an update of `trained` parameters from running in windows, with what to do; or None."""
    name = type(optimizer).__name__
    for i, group in enumerate(optimizer.param_groups):
        for option in OPTIONS:
            if group.get(option):
                return f"{name} with {option}=True can't be run in windows; set {option}=False"
        for parameter in filter(trained, group["params"]):
            if is_nondeterministic(optimizer, i, parameter.dtype):
                message = f"SGD with fused=True is not deterministic in {parameter.dtype}"
                return f"{message}, so it can't be run in windows; set fused=False"
    return None


def check_windows(optimizer: optim.Optimizer, unit_is_known: bool = False) -> None:
    """
    Args:
        unit_is_known: a trial has shown that it updates each parameter independently.

    Raises:
        UpdateError: the class, an option, a parameter or a gradient does not allow an update in windows.
    """
    if not unit_is_known and not declared_elementwise(type(optimizer)):
        raise UpdateError(
            f"{type(optimizer).__name__} is not known to update each element independently, and no trial shows it of "
            "each parameter, so its state can't be offloaded: give it to memgraph.compile"
        )
    if reason := option_reason(optimizer, lambda parameter: parameter.grad is not None) or _hook_reason(optimizer):
        raise UpdateError(reason)
    for parameter in parameter_groups(optimizer):
        if parameter.grad is not None:
            _check_tensors(type(optimizer).__name__, parameter, parameter.grad)


def _hook_reason(optimizer: optim.Optimizer) -> str | None:
    """Return why hooks of a step would run for each window: torch runs them in the step of a base, too."""
    kind = type(optimizer)
    hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    hooked = [base for base in kind.__mro__[1:] if getattr(vars(base).get("step"), "hooked", False)]
    names = set(getattr(getattr(unhooked_step(kind), "__code__", None), "co_names", ()))
    calls_base = "step" in names and not names.isdisjoint({"super", *(base.__name__ for base in hooked)})
    if "step" not in vars(kind) or not hooked or not any(hooks) or not calls_base:
        return None
    return (
        f"{kind.__name__} calls the step of {hooked[0].__name__}, in which torch runs the hooks of this optimizer once "
        "more, for each window of its update: remove the hooks of the step, or call them in the loop"
    )


def is_nondeterministic(optimizer: optim.Optimizer, group: int, dtype: torch.dtype) -> bool:
    """Return True if two runs of an update may differ."""
    # Seen in torch 2.13 with momentum: the last elements differ from run to run.
    return type(optimizer) is optim.SGD and bool(optimizer.param_groups[group]["fused"]) and dtype not in EXACT_DTYPES


def _check_tensors(name: str, parameter: Tensor, gradient: Tensor) -> None:
    if gradient.layout != torch.strided:
        message = f"{name} in windows takes dense gradients, and that of a parameter of shape {tuple(parameter.shape)}"
        raise UpdateError(f"{message} is {gradient.layout}; make it dense, e.g. with Embedding(sparse=False)")
    kind = type(parameter)
    if kind not in (Tensor, torch.nn.Parameter) or parameter.device != gradient.device or parameter.is_meta:
        actual = f"{kind.__name__} on {parameter.device}, its gradient on {gradient.device}"
        raise UpdateError(
            f"{name} in windows takes plain tensors on one device, not a {actual}; leave it on the device"
        )


def unhooked_step(kind: type[optim.Optimizer]) -> Callable[..., Any]:
    """Return the step of a class without the hooks that torch wraps around it."""
    step = kind.step
    return getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step


def replace_step(optimizer: optim.Optimizer, run: Callable[..., Any]) -> Any:
    """Return `run` as the optimizer's step: a method, because schedulers take the function out of what they wrap."""

    @functools.wraps(optimizer.step)
    def step(_: optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs)

    setattr(step, OURS, True)
    del step.__dict__["__wrapped__"]  # is bound: GradScaler asks for the signature, which would lose a second argument
    return MethodType(step, optimizer)
