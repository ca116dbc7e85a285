"""Refuse what forward draws from `random` or numpy in ways that no op repeats.

random.shuffle(order)                a CaptureError from the innermost submodule that draws
self.rng.random()                    the same, for a generator of the module's own
with allow_python_random(): ...      allowed: a part that runs as it is draws in every step

Each step would get the numbers of the trace.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ...errors import CaptureError
from ...system.own_generators import OwnStates, own_generators
from ...system.python_random import PythonRandom, restoring_python_random

STARTS: dict[int, list[_Start]] = {}  # of each thread that captures: where its running submodules began
ALLOWED: set[int] = set()  # threads that may draw now


class _Start:
    """The generators where a submodule began."""

    def __init__(self, own: Mapping[str, Any]) -> None:
        self.shared, self.own = PythonRandom(), OwnStates(own)

    def again(self) -> _Start:
        return _Start(self.own.generators)


@contextmanager
def refuse_python_random(whole: nn.Module) -> Iterator[None]:
    """Raise if the forward of `whole` draws from `random` or numpy, and restore all generators."""
    thread = get_ident()
    paths = {id(module): path for path, module in whole.named_modules()}
    outer, start = STARTS.get(thread), _Start(own_generators(whole))
    starts = [start]
    STARTS[thread] = starts

    def begin(module: nn.Module, args: Any) -> None:
        if get_ident() == thread and thread not in ALLOWED:
            starts.append(start.again())

    def end(module: nn.Module, args: Any, output: Any) -> None:
        if get_ident() == thread and thread not in ALLOWED and len(starts) > 1:
            _refuse_other(starts.pop(), paths.get(id(module), ""))

    hooks = [register_module_forward_pre_hook(begin), register_module_forward_hook(end)]
    try:
        with restoring_python_random(), torch.random.fork_rng(devices=()):
            yield
            _refuse_other(starts[0], "")
    finally:
        start.own.restore()
        for hook in hooks:
            hook.remove()
        if outer is None:
            del STARTS[thread]
        else:
            STARTS[thread] = outer


@contextmanager
def allow_python_random() -> Iterator[None]:
    """Let a block draw as in eager."""
    thread = get_ident()
    is_allowed = thread in ALLOWED
    ALLOWED.add(thread)
    try:
        yield
    finally:
        if not is_allowed:
            ALLOWED.discard(thread)
        starts = STARTS.get(thread, [])
        starts[:] = [start.again() for start in starts[:1]] * len(starts)


def _refuse_other(start: _Start, path: str) -> None:
    """Raise if a submodule that began in this state has drawn; the error is about one of its attributes."""
    if (name := start.own.changed()) is not None:
        raise CaptureError(
            f"forward{f' of {path}' if path else ''} draws from {name}, a {type(start.own.generators[name]).__name__} "
            "that is neither torch's nor the one of `random` or `numpy.random`, and its numbers would be the same in "
            "every step: draw with torch (torch.rand, with a torch.Generator if need be), or draw outside of the module"
        ).about(f"{path}.forward" if path else "")
    if not start.shared.has_changed():
        return
    raise CaptureError(
        f"forward{f' of {path}' if path else ''} draws random numbers with `random` or numpy in ways that a captured "
        "step can't repeat, which would be the same in every step: call the functions of `random` and `numpy.random` "
        "with plain numbers, draw with torch, or draw outside of the module"
    ).about(f"{path}.forward" if path else "")
