"""Code that may ask for the exact type of a number, which a stand-in for that number can't hide.

    if type(scale) is float: ...    ->   True: what ran here is not what runs with a float

`isinstance` finds a float, so it is no such question.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

from .frames import is_users_code


class TypeChecks:
    """Watches the functions that run: `found` is one that calls `type` and has a number of this kind at hand, or reads
    an attribute of one of these names."""

    def __init__(self, kind: type, names: Collection[str]) -> None:
        self.kind, self.names = kind, frozenset(names)
        self.found = ""
        self._asks: dict[CodeType, bool] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch this thread; a debugger's own watch is put back."""
        before = sys.gettrace()
        sys.settrace(self._called)
        try:
            yield
        finally:
            sys.settrace(before)

    def _called(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        asks = self._asks.get(code)
        if asks is None:
            asks = self._asks[code] = "type" in code.co_names and is_users_code(code)
        if not asks:
            return None
        frame.f_trace_lines = False
        return self._returns

    def _returns(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "return":
            code = frame.f_code
            near = any(_holds(value, self.kind) for value in frame.f_locals.values())
            if near or not self.names.isdisjoint((*code.co_names, *code.co_consts)):
                self.found = f"{code.co_filename}:{code.co_firstlineno} in {code.co_name}"
        return self._returns


def _holds(value: Any, kind: type, depth: int = 3) -> bool:
    """Whether it is of this kind, or a container of one."""
    if type(value) is kind:
        return True
    if depth and type(value) in (tuple, list):
        return any(_holds(item, kind, depth - 1) for item in value)
    if depth and type(value) is dict:
        return any(_holds(item, kind, depth - 1) for item in value.values())
    return False
