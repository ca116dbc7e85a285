"""Modules of Python that forward imports or finds."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch
from torch import Tensor

from .way import a_file, of


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
