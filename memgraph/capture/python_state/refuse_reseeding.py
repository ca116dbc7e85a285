"""Refuse what forward does to torch's generators, to `.data` or in threads: it would happen only once, in the trace.

    torch.manual_seed(0)                                a CaptureError, with the user's line
    with torch.random.fork_rng(): ...                   allowed: reads and writes of a state are ops of the graph
    noise = torch.rand(4, generator=self.generator)     allowed: the graph draws from it in every step
    y.data = y * 2                                      a CaptureError: no op is recorded for it
    y.data_ptr(), copy.deepcopy(y)                      the same
    pool.submit(read).result()                          the same: what other threads read is not seen

Torch's own code may do all of it: only calls from elsewhere are refused.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from traceback import walk_stack
from types import CodeType
from typing import Any, NoReturn
from unittest import mock

import torch
from torch import Tensor, _compile, nn
from torch._dynamo import eval_frame
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from ...errors import CaptureError
from ...graph.draws.generator_states import GENERATOR_STATE, SET_GENERATOR
from ...system.entered_code import STANDARD, is_watched
from ...system.frames import MEMGRAPH, TORCH

STATES = ("get_rng_state", "get_rng_state_all", "set_rng_state", "set_rng_state_all")
SEEDS = ("manual_seed", "manual_seed_all", "seed", "seed_all", "initial_seed")
# Files that only pass calls on.
BETWEEN = (
    torch.random.__file__, torch.cuda.random.__file__, torch.utils.dlpack.__file__, _compile.__file__,
    eval_frame.__file__, __file__,
)  # fmt: skip
INSTEAD = (
    "seed outside of the module, or draw from a torch.Generator that the module makes in __init__ and seeds nowhere "
    "else"
)
TRACING = threading.local()  # has `on` in the thread that traces
DATA: Any = torch.Tensor.data
# Torch's own give a traced tensor an address of 0, crash, or copy the whole trace.
READ_MEMORY = ("data_ptr", "__dlpack__", "__deepcopy__", "__reduce_ex__")


@contextmanager
def refuse_reseeding(module: nn.Module, is_traced: bool = True) -> Iterator[None]:
    """Raise if forward seeds a generator, makes one, or sets `.data`; restore all generators.

    The state of torch's own is read and set by ops if the forward is traced.
    """
    default = torch.default_generator
    with _disable_current_modes():
        seed, state = default.initial_seed(), default.get_state()
        own = [(name, generator, generator.get_state()) for name, generator in _generators(module)]
    try:
        with _guarded(is_traced):
            yield
        with _disable_current_modes():
            # Other threads may draw from it; forward does not, its numbers are fake.
            changed = ["torch.default_generator"] if default.initial_seed() != seed else []
            changed += [name for name, generator, before in own if not torch.equal(generator.get_state(), before)]
        if changed:
            raise CaptureError(f"forward seeds {changed[0]}, which would happen only once: {INSTEAD}")
    finally:
        with _disable_current_modes():
            if default.initial_seed() != seed:
                default.set_state(state)
            for _, generator, before in own:
                generator.set_state(before)


@contextmanager
def allow_reseeding() -> Iterator[None]:
    """Let code in a block do to generators and `.data` what it does in eager."""
    before = dict(vars(TRACING))
    vars(TRACING).clear()
    try:
        yield
    finally:
        vars(TRACING).update(before)


def _generators(module: nn.Module) -> Iterator[tuple[str, torch.Generator]]:
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if isinstance(value, torch.Generator):
                yield ".".join(filter(None, (path, name))), value


@contextmanager
def _guarded(is_traced: bool) -> Iterator[None]:
    with ExitStack() as stack:
        TRACING.on = True
        stack.callback(vars(TRACING).clear)
        stack.enter_context(
            mock.patch.object(torch.random, "default_generator", _Guard(torch.default_generator, is_traced))
        )
        stack.enter_context(mock.patch.object(torch, "Generator", _Refused))
        for device in (torch.cuda, torch.cuda.random):
            for name in (*STATES, *SEEDS):
                guarded = _refusing(f"torch.cuda.{name}", getattr(device, name), STATE_OPS.get(name), is_traced)
                stack.enter_context(mock.patch.object(device, name, guarded))
        stack.enter_context(mock.patch.object(FakeTensor, "data", property(DATA.__get__, _set_data), create=True))
        for kind, name in ((threading.Thread, "start"), (ThreadPoolExecutor, "submit")):
            stack.enter_context(mock.patch.object(kind, name, _starting(getattr(kind, name))))
        for name in READ_MEMORY:
            reading = _reading(name, getattr(FakeTensor, name))
            stack.enter_context(mock.patch.object(FakeTensor, name, reading, create=True))
        yield


def _starting(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that refuses work for another thread if forward gives it."""

    def start(*args: Any, **kwargs: Any) -> Any:
        callers = (each for each, _ in walk_stack(sys._getframe(1)) if not each.f_code.co_filename.startswith(STANDARD))
        if getattr(TRACING, "on", False) and is_watched(next(callers).f_code.co_filename):
            raise CaptureError(
                "forward runs code in another thread, where nothing tells what it reads: run it in forward's own, or "
                "outside of the module"
            )
        return run(*args, **kwargs)

    return start


def _refusing(
    name: str, run: Callable[..., Any], op: Callable[..., Any] | None = None, is_traced: bool = True
) -> Callable[..., Any]:  # fmt: skip
    """Return a function that refuses a call of the user's; with an `op`, one that calls it in a trace."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        if (caller := _caller()) is not None:
            if op is not None:
                return (op if is_traced else run)(*args, **kwargs)
            place, called = caller
            _refuse(called or name, place)
        return run(*args, **kwargs)

    return refuse


class _Guard:
    """Replaces the default generator for the functions of torch.random."""

    def __init__(self, generator: torch.Generator, is_traced: bool) -> None:
        self._generator, self._is_traced = generator, is_traced

    def __getattr__(self, name: str) -> Any:
        plain, op = getattr(self._generator, name), STATE_OPS.get(name)
        return _refusing(f"torch's default generator ({name})", plain, op, self._is_traced)


class _CreatedGenerators(type(torch.Generator)):  # type: ignore[misc]
    """Metaclass of a class that the user cannot instantiate, but whose instances are all generators."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return _refusing("a torch.Generator that it makes", torch._C.Generator)(*args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch._C.Generator)


class _Refused(torch._C.Generator, metaclass=_CreatedGenerators):
    """Replaces torch.Generator."""


def _set_data(tensor: Any, value: Any) -> None:
    if (caller := _caller()) is not None:
        place, _ = caller
        raise CaptureError(
            f"forward sets .data of a tensor at {place}, for which no op is recorded: "
            "compute another tensor, or change this one in place (under torch.no_grad(), if need be)"
        )
    DATA.__set__(tensor, value)


def _read_state(device: Any = "cuda") -> Tensor:
    return GENERATOR_STATE(_device(device))


def _write_state(new_state: Tensor, device: Any = "cuda") -> None:
    SET_GENERATOR(new_state, _device(device))


def _device(given: Any) -> torch.device:
    """Return a device, a GPU with its number."""
    device = torch.device("cuda", given) if isinstance(given, int) else torch.device(given)
    is_whole = device.type == "cpu" or device.index is not None
    return device if is_whole else torch.device(device.type, torch.get_device_module(device).current_device())


# Ops that read and set a state, in the place of a generator's methods and of functions of torch.cuda.
STATE_OPS: Mapping[str, Callable[..., Any]] = {
    "get_state": partial(_read_state, "cpu"), "set_state": partial(_write_state, device="cpu"),
    "get_rng_state": _read_state, "set_rng_state": _write_state,
}  # fmt: skip


def _reading(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that a user can't call, since a traced tensor has no memory."""

    def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if (caller := _caller()) is not None:
            raise CaptureError(
                f"forward reads the memory of a tensor ({name}) at {caller[0]}, for which no op is recorded: clone it "
                "instead of copying or pickling it; compute with torch ops, or make an op of what needs its memory "
                "with torch.library.custom_op and register_fake"
            )
        return plain(tensor, *args, **kwargs)

    return read


def _refuse(what: str, place: str) -> NoReturn:
    raise CaptureError(
        f"forward asks or seeds {what} at {place}, which would happen only once, while it is captured: {INSTEAD}"
    )


def _caller() -> tuple[str, str] | None:
    """Return the line that calls and torch's function, if known; None for torch, memgraph, and other threads."""
    if not hasattr(TRACING, "on"):
        return None
    frame, called = sys._getframe(1), ""
    while frame is not None and _passes_on(frame.f_code):
        called = _public_name(frame.f_code) or called
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None or frame.f_code.co_filename.startswith((TORCH, MEMGRAPH)):
        return None
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}", called


def _public_name(code: CodeType) -> str:
    """Return the name by which a user calls one of torch's functions for generators; empty for other code."""
    name, own = code.co_name, "torch" if hasattr(torch, code.co_name) else "torch.random"
    package = {torch.random.__file__: own, torch.cuda.random.__file__: "torch.cuda"}.get(code.co_filename)
    return f"{package}.{name}" if package and name in (*STATES, *SEEDS, "fork_rng") else ""


def _passes_on(code: CodeType) -> bool:
    return code.co_filename in BETWEEN or code.co_filename.endswith("contextlib.py")
