"""Modes, hooks and functions of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from .way import changing, of, on_module, prepared, setting

NUMBER = 2
TYPES: dict[type, int] = {}


@of("torch")
def _() -> Any:
    """the default dtype"""

    def change() -> Callable[[], None]:
        torch.set_default_dtype(torch.float64)
        return lambda: torch.set_default_dtype(torch.float32)

    return lambda m, x: x * torch.tensor(0.1).double().float(), change


@of("torch")
def _() -> Any:
    """grad mode that forward asks for"""
    return lambda m, x: x * (2 if torch.is_grad_enabled() else 3), lambda: None


@of("torch")
def _() -> Any:
    """deterministic algorithms"""

    def change() -> Callable[[], None]:
        torch.use_deterministic_algorithms(True)
        return lambda: torch.use_deterministic_algorithms(False)

    return lambda m, x: x * (2 if torch.are_deterministic_algorithms_enabled() else 3), change


@of("torch")
def _() -> Any:
    """a forward hook of a part that reads a global"""
    then = prepared(
        lambda m, x: m.linear(x), lambda m: m.linear.register_forward_hook(lambda m, a, y: y * NUMBER)
    )  # fmt: skip
    return then, changing("NUMBER", 3)


@of("torch")
def _() -> Any:
    """a forward hook that is added"""
    return lambda m, x: m.linear(x), on_module(
        lambda m: m.linear.register_forward_hook(lambda m, a, y: y * 3).remove
    )  # fmt: skip


@of("torch")
def _() -> Any:
    """a pre-hook that is added"""
    return lambda m, x: m.linear(x), on_module(
        lambda m: m.linear.register_forward_pre_hook(lambda m, a: (a[0] * 3,)).remove
    )  # fmt: skip


def tripled_result(m: Any, a: Any, y: Any) -> Any:
    return y * 3 if type(m) is nn.Linear else None


def tripled_gradient(m: Any, a: Any, y: Any) -> Any:
    return (a[0] * 3,) if type(m) is nn.Linear and a[0] is not None else None


@of("torch")
def _() -> Any:
    """a hook of all modules that is added"""

    def change() -> Callable[[], None]:
        return nn.modules.module.register_module_forward_hook(tripled_result).remove

    return lambda m, x: m.linear(x), change


@of("torch")
def _() -> Any:
    """a backward hook of all modules that is added"""

    def change() -> Callable[[], None]:
        return nn.modules.module.register_module_full_backward_hook(tripled_gradient).remove

    return prepared(lambda m, x: m.held(x), lambda m: setattr(m, "held", nn.Linear(8, 8))), change


@of("torch")
def _() -> Any:
    """a backward hook of a part that is added"""
    return lambda m, x: m.linear(x), on_module(
        lambda m: m.linear.register_full_backward_hook(lambda m, a, y: (a[0] * 3,)).remove
    )  # fmt: skip


@of("torch")
def _() -> Any:
    """a hook of a parameter that is added"""
    return lambda m, x: x, on_module(lambda m: m.linear.weight.register_hook(lambda grad: grad * 3).remove)


class Tripled(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 3 if func is torch.relu else result


@of("torch")
def _() -> Any:
    """a `TorchFunctionMode` that is entered"""

    def change() -> Callable[[], None]:
        mode = Tripled()
        mode.__enter__()  # type: ignore[no-untyped-call]
        return lambda: mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    return lambda m, x: torch.relu(x), change


@of("torch")
def _() -> Any:
    """autocast that is entered"""

    def change() -> Callable[[], None]:
        mode = torch.autocast("cpu", torch.bfloat16)
        mode.__enter__()
        return lambda: mode.__exit__(None, None, None)

    return lambda m, x: m.linear(x).float(), change


@of("torch")
def _() -> Any:
    """`p.grad` in forward"""
    return lambda m, x: x * (2 if m.linear.weight.grad is None else 3), lambda: None


@of("torch")
def _() -> Any:
    """a function of torch that is replaced"""
    return lambda m, x: F.relu(x), setting(F, "relu", lambda x: x * 3)


@of("torch")
def _() -> Any:
    """the type of a tensor that forward makes, beside a number"""
    return lambda m, x: x * (NUMBER if type(x) is torch.Tensor else 7), changing("NUMBER", 3)


@of("torch")
def _() -> Any:
    """the type of a parameter, looked up in a table"""
    return lambda m, x: x * TYPES.get(type(m.linear.bias), 7), lambda: TYPES.update({nn.Parameter: 3})


@of("torch")
def _() -> Any:
    """`nn.Module.__call__`, replaced"""
    plain: Any = nn.Module.__call__

    def tripled(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return plain(module, *args, **kwargs) * (3 if type(module) is nn.Linear else 1)

    return lambda m, x: x, setting(nn.Module, "__call__", tripled)


@of("torch")
def _() -> Any:
    """a method of `torch.Tensor`, replaced after a patch that was taken back"""
    plain: Any = torch.Tensor.sigmoid
    torch.Tensor.sigmoid = lambda x: 3 * plain(x)  # type: ignore[method-assign, assignment]
    torch.Tensor.sigmoid = plain  # type: ignore[method-assign]
    return lambda m, x: x.sigmoid(), setting(torch.Tensor, "sigmoid", lambda x: 2 * plain(x))
