"""Find code that may check the exact type or the identity of a number, which a stand-in for the number can't hide.

    if type(scale) is float: ...    ->   found: another branch runs with the float itself
    if scale is DEFAULT: ...        ->   found

`isinstance` is no such check: the stand-in is an instance of float.
"""

from __future__ import annotations

import dis
import os
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

from torch import Tensor, nn

from ...system.frames import MEMGRAPH, TORCH
from ...system.own_attributes import attributes_of

LIBRARIES = (TORCH, MEMGRAPH, "<eval_with_key", "<frozen")  # their code is not watched, and neither is Python's own
STANDARD = str(Path(dis.__file__).parent) + os.sep
PACKAGES = ("site-packages", "dist-packages")  # which may be in a folder of the standard library's

CHECKS = frozenset({"type", "id", "is_", "is_not"})  # names of the functions that check; the last two of `operator`
MAKERS = ("item", "compute")  # functions of ours that return a stand-in to the code that calls them
SINGLETONS = (None, True, False, ...)  # neither a number nor its stand-in is one of these


class TypeChecks:
    """Watches the functions that run.

    Attributes:
        found: a function that checks types or identities, and has a number of one of `kinds` in a local variable, gets
            one from a function that it calls, or reads an attribute with one of `names`; "" if there was none.
    """

    def __init__(self, kinds: Collection[type], names: Collection[str] = ()) -> None:
        self.kinds, self.names = kinds, frozenset(names)
        self.found = ""
        self._checks: dict[CodeType, bool] = {}
        self._watched: dict[CodeType, bool] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch this thread; a debugger's own watch is put back."""
        before = sys.gettrace()
        sys.settrace(self._on_call)
        try:
            yield
        finally:
            sys.settrace(before)

    def _on_call(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        if code.co_name in MAKERS and code.co_filename.startswith(MEMGRAPH):
            self._note_if_checks(frame.f_back)
        watched = self._watched.get(code)
        if watched is None:
            watched = self._watched[code] = _is_watched(code.co_filename)
        if not watched:
            return None
        frame.f_trace_lines = False
        return self._on_event

    def _on_event(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "return":
            code = frame.f_code
            if self._checks_in(code):
                is_local = any(_contains(value, self.kinds) for value in frame.f_locals.values())
                if is_local or not self.names.isdisjoint((*code.co_names, *code.co_consts)):
                    self._note_if_checks(frame)
            if _contains(arg, self.kinds):
                self._note_if_checks(frame.f_back)
        return self._on_event

    def _note_if_checks(self, frame: FrameType | None) -> None:
        """Note the function of a frame, which has a number, if it checks types or identities."""
        if frame is not None and self._checks_in(frame.f_code):
            self.found = f"{frame.f_code.co_filename}:{frame.f_code.co_firstlineno} in {frame.f_code.co_name}"

    def _checks_in(self, code: CodeType) -> bool:
        checks = self._checks.get(code)
        if checks is None:
            checks = self._checks[code] = _is_watched(code.co_filename) and _checks(code)
        return checks


def _is_watched(file: str) -> bool:
    is_standard = file.startswith(STANDARD) and file.removeprefix(STANDARD).split(os.sep)[0] not in PACKAGES
    return not is_standard and not file.startswith(LIBRARIES)


def _checks(code: CodeType) -> bool:
    """Return True if a function may check an exact type or an identity."""
    if not CHECKS.isdisjoint(code.co_names):
        return True
    return any(
        after.opname == "IS_OP" and not (before.opname == "LOAD_CONST" and _is_singleton(before.argval))
        for before, after in pairwise(dis.get_instructions(code))
    )


def _is_singleton(value: object) -> bool:
    return any(value is singleton for singleton in SINGLETONS)


def _contains(value: object, kinds: Collection[type], depth: int = 3) -> bool:
    """Return True for a value of these classes, and for a container or a plain object that has one.

    Functions and classes hold no number of a call, and attributes of modules are found by name.
    """
    if type(value) in kinds:
        return True
    if not depth or callable(value) or isinstance(value, nn.Module | Tensor | ModuleType):
        return False
    if isinstance(value, tuple | list):
        return any(_contains(item, kinds, depth - 1) for item in value)
    if isinstance(value, dict):
        return any(_contains(item, kinds, depth - 1) for item in value.values())
    state = attributes_of(value)
    return state is not None and any(_contains(item, kinds, depth - 1) for item in state.values())
