"""A watch tells of code before its first line runs, and other tools see what they saw before."""

from __future__ import annotations

import functools
import os
import sys
import threading
from types import FrameType, SimpleNamespace

import pytest
import torch
from torch import nn

from memgraph.system import entered_code
from memgraph.system.entered_code import is_watched, unwatched, watching_entries


def plain() -> int:
    return 1


def closing_over(value: int) -> object:
    return lambda: value


class Names:
    """Takes the names of what is entered."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, frame: FrameType) -> None:
        self.names.append(frame.f_code.co_name)


def test_functions_hooks_and_partials_are_told_of_and_torch_is_not() -> None:
    note, layer = Names(), nn.Linear(2, 2)

    def hook(module: nn.Module, args: object, result: object) -> None:
        sum(map(int, []))

    layer.register_forward_hook(hook)
    with watching_entries(note):
        layer(torch.ones(1, 2))
        functools.partial(plain)()
    assert set(note.names) == {"hook", "plain"}
    before = list(note.names)
    plain()
    assert note.names == before


def test_code_that_closes_over_variables_is_told_of_each_time() -> None:
    note = Names()
    first, second = closing_over(1), closing_over(2)
    with watching_entries(note):
        first(), second()  # type: ignore[operator]
    assert note.names == ["<lambda>", "<lambda>"]


def test_what_other_threads_enter_is_not_told_of() -> None:
    note, thread = Names(), threading.Thread(target=plain)
    with watching_entries(note):
        thread.start()
        thread.join()
        assert note.names == []
        plain()
    assert note.names == ["plain"]


def test_a_block_inside_is_told_of_to_both_unless_it_hides() -> None:
    outer, inner = Names(), Names()
    with watching_entries(outer), watching_entries(inner):
        plain()
    assert outer.names == inner.names == ["plain"]
    hidden = Names()
    with watching_entries(outer), unwatched():
        plain()
        with watching_entries(hidden):
            plain()
    assert outer.names == ["plain"] and hidden.names == ["plain"]


def test_an_error_leaves_no_watch() -> None:
    note = Names()
    with pytest.raises(ValueError, match="stop"), watching_entries(note):
        raise ValueError("stop")
    plain()
    assert note.names == []


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="later Pythons have room for several tools")
def test_a_tracer_of_the_callers_is_put_back() -> None:
    def tracer(frame: FrameType, event: str, argument: object) -> None:
        pass

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        with watching_entries(Names()):
            pass
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(before)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring is new in 3.12")
def test_a_tool_of_the_callers_goes_on_and_ours_is_given_back() -> None:
    monitoring, seen = sys.monitoring, []  # type: ignore[attr-defined] # for the oldest Python
    used = [tool for tool in range(6) if monitoring.get_tool(tool) is not None]
    free = next(tool for tool in range(6) if tool not in used)
    monitoring.use_tool_id(free, "a test")
    monitoring.register_callback(free, monitoring.events.PY_START, lambda code, place: seen.append(code.co_name))
    monitoring.set_events(free, monitoring.events.PY_START)
    try:
        with watching_entries(Names()):
            plain()
    finally:
        monitoring.set_events(free, 0)
        monitoring.free_tool_id(free)
    assert "plain" in seen
    assert [tool for tool in range(6) if monitoring.get_tool(tool) is not None] == used


def test_files_of_torch_of_the_library_and_of_this_package_are_left_out() -> None:
    files = torch.__file__, functools.__file__, sys.modules[watching_entries.__module__].__file__
    assert not any(is_watched(str(file)) for file in files)
    assert is_watched(__file__)
    assert is_watched("/lib/python3.11/site-packages/transformers/modeling.py")
    assert not is_watched("/lib/python3.11/site-packages/sympy/core.py")


@pytest.mark.parametrize("package", ["filelock", "networkx", "jinja2", "typing_extensions"])
def test_what_torch_requires_is_left_out(package: str) -> None:
    assert not is_watched(f"/lib/python3.11/site-packages/{package}/_api.py")
    assert not is_watched(f"/lib/python3.11/site-packages/{package}.py")


def test_files_that_find_modules_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """An import in forward runs such code, which is not forward's."""
    file, name = f"{os.sep}site-packages{os.sep}finds_modules{os.sep}__init__.py", "finds_modules"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(__file__=file))
    for is_finder in (False, True):
        if is_finder:
            monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, type("Finder", (), {"__module__": name})()])
        entered_code._finders.cache_clear()
        entered_code.is_watched.cache_clear()
        assert is_watched(file) != is_finder
        assert is_watched(file.replace("__init__", "other"))
    monkeypatch.undo()
    entered_code._finders.cache_clear()
    entered_code.is_watched.cache_clear()
