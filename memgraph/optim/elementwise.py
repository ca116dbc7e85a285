"""Whether an optimizer changes each element by itself, so that its own step may be run on any range of elements.

    AdamW                        ->   yes: each element's parameter, gradient and states decide
    AdamW(differentiable=True)   ->   no, and why, in words
    one of the caller's          ->   if its class says `pointwise = True`

Which of torch's do is a list, and the tests show each of them bit-equal in windows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, optim

from ..errors import UpdateError

ELEMENTWISE = (
    *(optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad, optim.RMSprop, optim.Adamax),
    *(optim.NAdam, optim.RAdam, optim.Adadelta, optim.Rprop, optim.ASGD),
)
OPTIONS = ("differentiable", "capturable")  # with which no update is run in windows
EXACT_DTYPES = (torch.float32, torch.float64)  # results in these do not depend on which elements a kernel takes at once


def is_exact(parameter: Tensor, hosted: bool = False) -> bool:
    """Whether results do not depend on where an update of the parameter is cut; `hosted`: the host updates it.

    A GPU's kernels compute each element in the same way, whatever stands beside it.  A CPU's take whole vectors of
    elements and the rest one by one, which rounds otherwise in low precision.  Not yet run on a GPU.
    """
    return parameter.dtype in EXACT_DTYPES or (parameter.device.type == "cuda" and not hosted)


def declared_elementwise(kind: type[optim.Optimizer]) -> bool:
    """Whether an optimizer of this class changes each element by itself: it is one of the list, or its class says so,
    with `pointwise = True`.  A class that is derived from such a one may do otherwise, and says so again."""
    return kind in ELEMENTWISE or vars(kind).get("pointwise") is True


def is_elementwise(optimizer: optim.Optimizer) -> bool:
    """Whether its update can be run in windows, whatever gradients there will be."""
    return declared_elementwise(type(optimizer)) and not any(
        group.get(o) for group in optimizer.param_groups for o in OPTIONS
    )


def unsupported_reason(optimizer: optim.Optimizer, trained: Callable[[Tensor], bool]) -> str | None:
    """What is in the way of running its update in windows, whatever gradients those that are `trained` will have, in
    words, with what to do."""
    name = type(optimizer).__name__
    if not declared_elementwise(type(optimizer)):
        known = ", ".join(one.__name__ for one in ELEMENTWISE)
        message = f"{name} is not known to change each element by itself, so its state can't be streamed"
        advice = f"use one of {known} itself, say pointwise = True in its class if that is so"
        return f"{message}; {advice}, or leave state and parameters on the device"
    for i, group in enumerate(optimizer.param_groups):
        for option in OPTIONS:
            if group.get(option):
                return f"{name} with {option}=True can't be run in windows; set {option}=False"
        for parameter in filter(trained, group["params"]):
            if is_nondeterministic(optimizer, i, parameter.dtype):
                message = f"SGD with fused=True does not give the same twice in {parameter.dtype}"
                return f"{message}, so it can't be run in windows; set fused=False"
    return None


def check_elementwise(optimizer: optim.Optimizer) -> None:
    """Raise what is in the way of running this optimizer's update in windows.

    Raises:
        UpdateError: it is none of those that are known to be pointwise, or an option or a gradient stands against it.
    """
    if found := unsupported_reason(optimizer, lambda parameter: parameter.grad is not None):
        raise UpdateError(found)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                _refuse_gradient(type(optimizer).__name__, parameter, parameter.grad)


def is_nondeterministic(optimizer: optim.Optimizer, group: int, dtype: torch.dtype) -> bool:
    """Whether an update does not give the same twice."""
    # Seen in torch 2.13 with momentum: the last elements differ from run to run.
    return type(optimizer) is optim.SGD and bool(optimizer.param_groups[group]["fused"]) and dtype not in EXACT_DTYPES


def _refuse_gradient(name: str, parameter: Tensor, gradient: Tensor) -> None:
    where = f"of a parameter of shape {tuple(parameter.shape)}"
    if gradient.layout != torch.strided:
        advice = "make it dense, e.g. with Embedding(sparse=False)"
        raise UpdateError(f"{name} in windows takes dense gradients, and that {where} is {gradient.layout}; {advice}")
    kind = type(parameter)
    if kind not in (Tensor, torch.nn.Parameter) or parameter.device != gradient.device or parameter.is_meta:
        found = f"{kind.__name__} on {parameter.device}, its gradient on {gradient.device}"
        raise UpdateError(f"{name} in windows takes plain tensors of one device, not a {found}; leave it on the device")


def unhooked_step(kind: type[optim.Optimizer]) -> Callable[..., Any]:
    """The step of a class as it was written, without the hooks that torch puts around it."""
    step = kind.step
    return getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step


def replace_step(optimizer: optim.Optimizer, run: Callable[..., Any]) -> Any:
    """`run` as the optimizer's step: a method, because schedulers take the function out of what they wrap."""

    @functools.wraps(optimizer.step)
    def step(_: optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs)

    del step.__dict__["__wrapped__"]  # is bound: GradScaler asks for the signature, which would lose a second argument
    return MethodType(step, optimizer)
