"""The names to which code refers are those that it loads, stores, imports, or computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from memgraph.guards.code_reads import code_reads

ARGS: Any = None
STATE: Any = None
LEVEL = 0


def stores() -> None:
    global LEVEL
    LEVEL = 1
    STATE.n += 1


def imports() -> Any:
    import os.path
    from collections import deque as queue

    return os, queue


def by_text() -> Any:
    return __import__("collections")


def test_paths_begin_at_globals_and_go_on_with_attributes() -> None:
    assert ("ARGS", "model", "scale") in code_reads((lambda x: x * ARGS.model.scale).__code__).paths
    assert {("LEVEL",), ("STATE",)} <= set(code_reads(stores.__code__).paths)
    assert "n" in code_reads(stores.__code__).names


def test_imports_inside_of_a_function() -> None:
    found = {(each.module, each.names) for each in code_reads(imports.__code__).imports}
    assert found == {("os.path", ()), ("collections", ("deque",))}
    modules = [module.__name__ for each in code_reads(by_text.__code__).imports for module in each.found("")]
    assert modules == ["collections"]


@pytest.mark.parametrize(
    ("code", "computes"),
    [
        (lambda x, n: getattr(x, "a"), False),  # noqa: B009
        (lambda x, n: getattr(x.y[0], "a", None), False),
        (lambda x, n: getattr(x, "a", getattr(x, "b", 1)), False),
        (lambda x, n: getattr(x, n), True),
        (lambda x, n: getattr(x, f"a{n}"), True),
        (lambda x, n: getattr(x, "a" + n, 3), True),
        (lambda x, n: getattr(x, "a" + "b" * len(n[:1])), True),
        (lambda x, n: vars(x), True),
        (lambda x, n: x.__dict__, True),
        (lambda x, n: x.a, False),
    ],
)
def test_names_that_are_computed_are_noticed(code: Callable[..., Any], computes: bool) -> None:
    """A default that is a call may be taken for a computed name: then all attributes count."""
    found = code_reads(code.__code__).takes_any
    assert found >= computes
    if code.__code__.co_names.count("getattr") < 1 or "b" not in code.__code__.co_consts:
        assert found == computes


def test_a_text_that_may_be_a_name_counts() -> None:
    assert "scale" in code_reads((lambda x: getattr(x, "scale")).__code__).names  # noqa: B009
