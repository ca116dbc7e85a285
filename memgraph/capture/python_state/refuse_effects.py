"""Refuse what forward does to the process, or to tensors of the caller, that no step would do again.

    torch.set_grad_enabled(False), torch.use_deterministic_algorithms(True)    and left so: a CaptureError by its name
    self.body.requires_grad_(False), self.weight.register_hook(scale)          the same
    self.optimizer.step(), optimizer.zero_grad()                               the same
    saved_tensors_hooks(pack, unpack)                                          the same

It happens in the trace alone, and is taken back there.  What is undone before forward ends is allowed.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import get_ident
from types import FrameType
from typing import Any, NoReturn
from unittest import mock

import numpy as np
import torch
from torch import Tensor, optim
from torch.autograd.graph import saved_tensors_hooks
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...errors import CaptureError
from ...graph.captured import Input
from ...guards.signature import KERNEL_MODES, kernel_modes, other_modes
from ...system.frames import is_users_code
from ...tensors.layout import has_storage

Get = Callable[[], Any]
Set = Callable[[Any], object]
OUTSIDE = "no captured step does so; do it outside of the module, before the call"


def _set_deterministic(mode: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(mode[0], warn_only=mode[1])


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _autocast() -> tuple[bool, ...]:
    return tuple(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))


def _set_autocast(enabled: Sequence[bool]) -> None:
    for kind, is_enabled in zip(("cpu", "cuda"), enabled, strict=True):
        torch.set_autocast_enabled(kind, is_enabled)


def _set_benchmark(enabled: bool) -> None:
    torch.backends.cudnn.benchmark = enabled


def _anomaly() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


def _levels() -> dict[str, int]:
    known = {"root": logging.root, **logging.root.manager.loggerDict}
    return {name: logger.level for name, logger in known.items() if isinstance(logger, logging.Logger)}


def _set_levels(levels: Mapping[str, int]) -> None:
    for name, level in levels.items():
        logging.getLogger(None if name == "root" else name).setLevel(level)


# What may be set, how it is read, and how it is put back.
SETTINGS: Mapping[str, tuple[Get, Set]] = {
    "the grad mode (torch.set_grad_enabled)": (torch.is_grad_enabled, torch._C._set_grad_enabled),
    "the default dtype (torch.set_default_dtype)": (torch.get_default_dtype, torch.set_default_dtype),
    "torch.use_deterministic_algorithms": (_deterministic, _set_deterministic),
    "torch.set_float32_matmul_precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "torch.set_num_threads": (torch.get_num_threads, torch.set_num_threads),
    "torch.backends.cudnn.benchmark": (lambda: torch.backends.cudnn.benchmark, _set_benchmark),
    "autocast (torch.set_autocast_enabled)": (_autocast, _set_autocast),
    "torch.autograd.set_detect_anomaly": (_anomaly, lambda mode: torch.autograd.set_detect_anomaly(*mode)),
    "numpy.seterr": (np.geterr, lambda errors: np.seterr(**errors)),
    "the level of a logger": (_levels, _set_levels),
}


class InputRequiresGradError(CaptureError):
    """Forward calls `requires_grad_()` on tensors that it is given, at these places among its arguments."""

    def __init__(self, places: tuple[int, ...]) -> None:
        super().__init__(f"forward changes requires_grad of input {places[0]}, but {OUTSIDE}")
        self.places = places


class _Process:
    """The settings of the process at one moment."""

    def __init__(self) -> None:
        self.settings = {name: read() for name, (read, _) in SETTINGS.items()}
        self.kernels = dict(zip(KERNEL_MODES, kernel_modes(), strict=True))
        self.others = other_modes()

    def restore(self) -> None:
        for name, (read, put_back) in SETTINGS.items():
            if read() != self.settings[name]:
                put_back(self.settings[name])

    def changed(self) -> str:
        """Return what is set otherwise now; empty if nothing is."""
        now = _Process()
        for mine, theirs in ((self.settings, now.settings), (self.kernels, now.kernels)):
            # A logger that is made is not yet there before.
            for name in mine:
                if _known(mine[name], theirs[name]) != mine[name]:
                    return name
        return "a mode of torch" if self.others != now.others else ""


def _known(before: Any, now: Any) -> Any:
    """Return what is now of that which was there before."""
    return {key: now.get(key) for key in before} if isinstance(before, dict) else now


@contextmanager
def refuse_effects(roles: Sequence[Input], tensors: Sequence[Tensor], is_traced: bool = True) -> Iterator[None]:
    """Raise if the block leaves the process, or the call's tensors, otherwise than they were; put both back.

    Args:
        tensors: those of the call, by role; in a trace those that stand for them.
    """
    process, flags = _Process(), [tensor.requires_grad for tensor in tensors]
    hooks, layouts = [_hooks(tensor) for tensor in tensors], [_layout(tensor) for tensor in tensors]

    def refuse_settings() -> None:
        if changed := process.changed():
            raise CaptureError(f"forward sets {changed}, and leaves it so, but {OUTSIDE}")
        rows = ((role, _layout(t), before) for role, t, before in zip(roles, tensors, layouts, strict=False))
        # A buffer of another shape has an error of its own.
        relaid = (role for role, now, was in rows if now != was and (role.kind == "input" or now[0] == was[0]))
        if (role := next(relaid, None)) is not None:
            raise CaptureError(
                f"forward changes the shape or the strides of {role.label} in place, as no captured step can: use the "
                "op without the underscore (unsqueeze, t, ...), and return what the caller needs"
            )

    try:
        with _refusing_optimizers(), _refusing_saved_hooks():
            yield
        refuse_settings()
        given = list(zip(roles, tensors, flags, hooks, strict=False))
        flagged = [(role, flag) for role, tensor, flag, _ in given if tensor.is_leaf and tensor.requires_grad != flag]
        hooked = [role for role, tensor, _, had in given if role.kind != "input" and _hooks(tensor) != had]
        kept = [role for role, tensor, *_ in given if role.kind == "input" and tensor.retains_grad]
    except Exception:
        refuse_settings()  # that is what it failed at
        raise
    finally:
        process.restore()
        for tensor, flag in zip(tensors, flags, strict=True):
            if not is_traced and tensor.is_leaf and tensor.requires_grad != flag:
                tensor.requires_grad_(flag)
    if flagged and all(role.kind == "input" and not flag for role, flag in flagged):
        raise InputRequiresGradError(tuple(role.index for role, _ in flagged))
    if flagged:
        raise CaptureError(f"forward changes requires_grad of {flagged[0][0].label}, but {OUTSIDE}")
    if kept:
        raise CaptureError(f"forward calls retain_grad() on {kept[0].label}, but {OUTSIDE}")
    if hooked:
        raise CaptureError(f"forward registers a hook on {hooked[0].label}, but {OUTSIDE}")


def _layout(tensor: Tensor) -> tuple[object, object]:
    with torch._C.DisableTorchFunction():
        return (tensor.shape, tensor.stride()) if has_storage(tensor) else ((), ())


def _hooks(tensor: Tensor) -> int:
    """Return the number of hooks on a tensor's gradient."""
    with torch._C.DisableTorchFunction():
        after: Any = tensor._post_accumulate_grad_hooks if tensor.is_leaf else None
        return len(tensor._backward_hooks or ()) + len(after or ())


@contextmanager
def _refusing_optimizers() -> Iterator[None]:
    """Refuse steps of optimizers, and what they do to gradients, on this thread."""
    thread, errors = get_ident(), list[CaptureError]()

    def refuse(what: str) -> NoReturn:
        errors.append(CaptureError(f"forward calls {what} of an optimizer, but {OUTSIDE}"))
        raise errors[-1]

    def before_step(optimizer: optim.Optimizer, *_: Any) -> None:
        if get_ident() == thread:
            refuse("step()")

    zero_grad = optim.Optimizer.zero_grad

    def zeroed(optimizer: optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        if get_ident() == thread:
            refuse("zero_grad()")
        zero_grad(optimizer, *args, **kwargs)

    handle = register_optimizer_step_pre_hook(before_step)
    try:
        with mock.patch.object(optim.Optimizer, "zero_grad", zeroed):
            yield
    finally:
        handle.remove()
    if errors:
        raise errors[0]  # it was caught


@contextmanager
def _refusing_saved_hooks() -> Iterator[None]:
    """Refuse hooks of the user for what backward saves: they may change it, and a plan saves other things."""
    thread, enter = get_ident(), saved_tensors_hooks.__enter__

    def entered(hooks: saved_tensors_hooks) -> None:
        is_torchs = type(hooks) is not saved_tensors_hooks and type(hooks).__module__.startswith("torch.")
        if get_ident() == thread and not is_torchs and _is_users(sys._getframe(1)):
            raise CaptureError(
                "forward enters saved_tensors_hooks, which may change what backward reads, and a captured step decides "
                "itself what it keeps: leave them out, or let the submodule that enters them run as it is (opaque=)"
            )
        enter(hooks)

    with mock.patch.object(saved_tensors_hooks, "__enter__", entered):
        yield


def _is_users(frame: FrameType | None) -> bool:
    """Return True if code of the user, maybe by way of contextlib, enters a block."""
    while frame is not None and frame.f_globals.get("__name__") == "contextlib":
        frame = frame.f_back
    return frame is not None and is_users_code(frame.f_code)
