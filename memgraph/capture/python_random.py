"""Refuse what forward draws from `random` or numpy: each step would get the numbers of the trace.

mask = numpy.random.rand(4) < 0.5                   a CaptureError from the innermost submodule that draws
with allow_python_random(): ...                     allowed: a part that runs as it is draws in every step
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ..errors import CaptureError

STARTS: dict[int, list[Any]] = {}  # of each thread that captures: the states in which its running submodules began
ALLOWED: set[int] = set()  # threads that may draw now


@contextmanager
def refuse_python_random(whole: nn.Module) -> Iterator[None]:
    """Raise if the forward of `whole` draws from `random` or numpy, and restore all generators."""
    before, thread = _states(), get_ident()
    paths = {id(module): path for path, module in whole.named_modules()}
    outer, starts = STARTS.get(thread), [before]
    STARTS[thread] = starts

    def begin(module: nn.Module, args: Any) -> None:
        if get_ident() == thread and thread not in ALLOWED:
            starts.append(_states())

    def end(module: nn.Module, args: Any, output: Any) -> None:
        if get_ident() == thread and thread not in ALLOWED and len(starts) > 1:
            _refuse_other(starts.pop(), paths.get(id(module), ""))

    hooks = [register_module_forward_pre_hook(begin), register_module_forward_hook(end)]
    try:
        with torch.random.fork_rng(devices=()):
            yield
        _refuse_other(starts[0], "")
    finally:
        for hook in hooks:
            hook.remove()
        STARTS.pop(thread) if outer is None else STARTS.update({thread: outer})
        _restore(before)


@contextmanager
def allow_python_random() -> Iterator[None]:
    """Let a block draw."""
    thread = get_ident()
    is_allowed = thread in ALLOWED
    ALLOWED.add(thread)
    try:
        yield
    finally:
        if not is_allowed:
            ALLOWED.discard(thread)
        starts = STARTS.get(thread, [])
        starts[:] = [_states()] * len(starts)


def _refuse_other(start: Any, path: str) -> None:
    """Raise if a submodule that began in this state has drawn; the error is about one of its attributes."""
    now = _states()
    if all(_is_same(one, other) for one, other in zip(now, start, strict=True)):
        return
    raise CaptureError(
        f"forward{f' of {path}' if path else ''} draws random numbers with `random` or numpy, which would be the same "
        "in every step: draw them with torch, or outside of the module"
    ).about(f"{path}.forward" if path else "")


def _states() -> tuple[Any, Any]:
    numpy = _numpy()
    return random.getstate(), numpy.get_state() if numpy else ()


def _restore(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    if states[1]:
        _numpy().set_state(states[1])


def _numpy() -> Any:
    return getattr(sys.modules.get("numpy"), "random", None)


def _is_same(now: Any, before: Any) -> bool:
    if len(now) != len(before):  # forward has imported numpy
        return False
    return all((a == b).all() if hasattr(a, "all") else a == b for a, b in zip(now, before, strict=True))
