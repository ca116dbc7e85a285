"""See which code is entered in a block: functions, methods and hooks, whatever calls them.

with watching_entries(note): model(x)    ->   note(frame) before the first line of each function that runs

Torch, Python's library and this package are left out.  From Python 3.12 on each code is told of once, but one that
closes over variables each time: its functions differ.  Python 3.11 tells of each call, and has no other tracer
meanwhile; what runs inside of an op is not watched there, or a trace would take twice its time.
"""

from __future__ import annotations

import dis
import functools
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest import mock

from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

import passes

from ..errors import CaptureError
from .frames import MEMGRAPH, TORCH
from .own_attributes import file_of

Note = Callable[[FrameType], object]

STANDARD = str(Path(dis.__file__).parent) + os.sep
PASSES = str(Path(passes.__file__).parent) + os.sep
PACKAGES = ("site-packages", "dist-packages")
NAME = re.compile(r"[\w.-]+")  # of what a package requires, before its versions
TOOL = "memgraph"
IDS = (4, 3, 5, 2, 1, 0)  # of `sys.monitoring`; the first two belong to no kind of tool

_notes: list[tuple[Note, int]] = []  # of the blocks that are running, with their threads
_lock = threading.RLock()


def _is_watched(code: CodeType, content: dict[str, Any]) -> bool:
    """Return True for code that is told of; what was made from a text, as by dataclasses, belongs to its module."""
    if not code.co_filename.startswith("<"):
        return is_watched(code.co_filename)
    name = str(content.get("__name__", ""))
    file = file_of(name)
    return not name.startswith("namedtuple_") and (file is None or is_watched(file))


@functools.lru_cache(20_000)
def is_watched(file: str) -> bool:
    """Return True for a file whose code is told of."""
    if file.startswith((TORCH, MEMGRAPH, PASSES, "<frozen")) or file in _finders():
        return False
    parts = Path(file).parts
    inside = next((parts[i + 1] for i, part in enumerate(parts[:-1]) if part in PACKAGES), "")
    return inside.removesuffix(".py") not in _beneath() if inside else not file.startswith(STANDARD)


@functools.cache
def _finders() -> frozenset[str]:
    """Return the files whose code looks for modules, at each import."""
    kinds = (each if isinstance(each, type) else type(each) for each in sys.meta_path)
    return frozenset(str(getattr(sys.modules.get(kind.__module__), "__file__", "")) for kind in kinds)


@functools.cache
def _beneath() -> frozenset[str]:
    """Return the packages that torch itself runs, which read nothing of the user's: numpy, and those it requires."""
    found, left = {"numpy"}, ["torch"]
    while left:
        with suppress(PackageNotFoundError):
            lines = [line for line in requires(left.pop()) or () if "extra ==" not in line]
            names = {match[0] for line in lines if (match := NAME.match(line))}
            left += [name for name in names if name not in found]
            found |= names
    return frozenset(name.lower().replace("-", "_") for name in found)


@contextmanager
def watching_entries(note: Note) -> Iterator[None]:
    """Call `note` for what is entered in a block, in this thread and in those that autograd starts.

    Raises:
        CaptureError: another tool takes all places of Python's for this.
    """
    one = note, threading.get_ident()
    with _lock:
        _notes.append(one)
        before = _begin()
    try:
        yield
    finally:
        with _lock:
            _notes.remove(one)
            _end(before)


@contextmanager
def unwatched() -> Iterator[None]:
    """Hide what a block runs from those who watch around it."""
    with _lock:
        hidden, _notes[:] = _notes.copy(), []
    try:
        yield
    finally:
        with _lock:
            _notes[:] = hidden
            if hidden and sys.version_info >= (3, 12):
                sys.monitoring.restart_events()  # some of what the block has entered may be entered again


def _tell(frame: FrameType) -> None:
    thread = threading.get_ident()
    others = {each.ident for each in threading.enumerate() if not each.name.startswith("Dummy")}
    for note, of in _notes.copy():
        if of == thread or thread not in others:  # C++ has started it
            note(frame)


if sys.version_info >= (3, 12):
    MONITORING = sys.monitoring
    _open: list[int] = []  # the tool, for each block that is running

    def _start(code: CodeType, offset: int) -> Any:
        if not _is_watched(code, (frame := sys._getframe(1)).f_globals):
            return MONITORING.DISABLE
        _tell(frame)
        known = threading.get_ident() in {of for _, of in _notes}
        return MONITORING.DISABLE if known and not code.co_freevars else None

    def _begin() -> int:
        own = [tool for tool in IDS if MONITORING.get_tool(tool) == TOOL]
        free = own or [tool for tool in IDS if MONITORING.get_tool(tool) is None]
        if not free:
            raise CaptureError(
                "all six tools of sys.monitoring are in use, and none is left to see what forward reads: stop a "
                "debugger, a profiler or a measurement of coverage during the first step"
            )
        if not own:
            MONITORING.use_tool_id(free[0], TOOL)
            MONITORING.register_callback(free[0], MONITORING.events.PY_START, _start)
            MONITORING.set_events(free[0], MONITORING.events.PY_START)
        _open.append(free[0])
        MONITORING.restart_events()
        return free[0]

    def _end(tool: int) -> None:
        _open.pop()
        if not _open:
            MONITORING.set_events(tool, MONITORING.events.NO_EVENTS)
            MONITORING.free_tool_id(tool)

    def unwatched_ops() -> Any:
        """Return a block that is as fast as without a watch: there is nothing to do."""
        return nullcontext()

else:
    _own: list[Any] = []  # tracers of this package that were there before, and go on

    def _trace(frame: FrameType, event: str, argument: object) -> Any:
        if _is_watched(frame.f_code, frame.f_globals):
            _tell(frame)
            if frame.f_code.co_freevars:
                frame.f_locals  # noqa: B018 # read again: Python writes into cells what it has found there before
        return _own[-1](frame, event, argument) if _own else None

    def _begin() -> Any:
        before = sys.gettrace()
        if before is not _trace and str(getattr(before, "__module__", "")).startswith("memgraph."):
            _own.append(before)
        sys.settrace(_trace)
        return before

    def _end(before: Any) -> None:
        if _own and _own[-1] == before:
            _own.pop()
        sys.settrace(before)

    def unwatched_ops() -> Any:
        """Return a block in which no traced op is watched while it is described and put into the graph."""
        plain = ProxyTorchDispatchMode.__torch_dispatch__

        def dispatch(*args: Any, **kwargs: Any) -> Any:
            if (tracer := sys.gettrace()) is None or _own:
                return plain(*args, **kwargs)
            sys.settrace(None)
            try:
                return plain(*args, **kwargs)
            finally:
                sys.settrace(tracer)

        return mock.patch.object(ProxyTorchDispatchMode, "__torch_dispatch__", dispatch)
