"""Modules of Python that forward imports or finds."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch
from torch import Tensor

from .way import Settings, a_file, of


@of("imports")
def _() -> Any:
    """`from file import X` inside of forward"""
    file = a_file(X=2)

    def then(m: Any, x: Tensor) -> Tensor:
        from a_file_of_a_way import X  # type: ignore[import-not-found]

        return x * X

    return then, lambda: setattr(file, "X", 3)


@of("imports")
def _() -> Any:
    """`import file` inside of forward"""
    file = a_file(X=2)

    def then(m: Any, x: Tensor) -> Tensor:
        import a_file_of_a_way

        return x * a_file_of_a_way.X

    return then, lambda: setattr(file, "X", 3)


@of("imports")
def _() -> Any:
    """`importlib.import_module` inside of forward"""
    file = a_file(X=2)
    return lambda m, x: x * importlib.import_module("a_file_of_a_way").X, lambda: setattr(file, "X", 3)


FILE = a_file(X=2, TABLE={"a": 2})


@of("imports")
def _() -> Any:
    """a global of another file"""
    FILE.X = 2
    return lambda m, x: x * FILE.X, lambda: setattr(FILE, "X", 3)


@of("imports")
def _() -> Any:
    """an entry of a dict of another file"""
    FILE.TABLE["a"] = 2
    return lambda m, x: x * FILE.TABLE["a"], lambda: FILE.TABLE.update(a=3)


@of("imports")
def _() -> Any:
    """`sys.modules`"""
    file = a_file(X=2)
    return lambda m, x: x * sys.modules["a_file_of_a_way"].X, lambda: setattr(file, "X", 3)


@of("imports")
def _() -> Any:
    """a function of another file that is replaced"""
    FILE.act = torch.relu
    return lambda m, x: FILE.act(x), lambda: setattr(FILE, "act", torch.tanh)


@of("imports")
def _() -> Any:
    """`from file import *` in a text that forward executes"""
    file = a_file(X=2)

    def then(m: Any, x: Tensor) -> Tensor:
        names: dict[str, Any] = {}
        exec("from a_file_of_a_way import *", names)
        return x * names["X"]

    return then, lambda: setattr(file, "X", 3)


def scale_of(settings: Any) -> Any:
    return settings.X


@of("imports")
def _() -> Any:
    """a file that a function gets as its argument"""
    FILE.X = 2
    return lambda m, x: x * scale_of(FILE), lambda: setattr(FILE, "X", 3)


@of("imports")
def _() -> Any:
    """a file under another name"""
    FILE.X = 2

    def then(m: Any, x: Tensor) -> Tensor:
        settings = FILE or m
        return x * settings.X

    return then, lambda: setattr(FILE, "X", 3)


@of("imports")
def _() -> Any:
    """`getattr(file, key)`"""
    FILE.X, key = 2, ["X"]
    return lambda m, x: x * getattr(FILE, key[0]), lambda: setattr(FILE, "X", 3)


@of("imports")
def _() -> Any:
    """`vars(file)`"""
    FILE.X = 2
    return lambda m, x: x * vars(FILE)["X"], lambda: setattr(FILE, "X", 3)


@of("imports")
def _() -> Any:
    """`file.__dict__`"""
    FILE.X = 2
    return lambda m, x: x * FILE.__dict__["X"], lambda: setattr(FILE, "X", 3)


@of("imports")
def _() -> Any:
    """a variable that a file gets later, read by `getattr`"""
    vars(FILE).pop("MORE", None)
    return lambda m, x: x * getattr(FILE, "MORE", 2), lambda: setattr(FILE, "MORE", 3)


@of("imports")
def _() -> Any:
    """an attribute that an object of an imported file gets later"""
    file = a_file(a=Settings())

    def then(m: Any, x: Tensor) -> Tensor:
        import a_file_of_a_way

        return x * getattr(a_file_of_a_way.a, "more", 2)

    return then, lambda: setattr(file.a, "more", 3)
