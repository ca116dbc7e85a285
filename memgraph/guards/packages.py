"""Tell apart user code, installed packages, and libraries that have no state of interest.

class Layer(nn.Module) of model.py   ->   is_open, not is_installed
transformers' GPT2Model              ->   is_open, is_installed
nn.Linear                            ->   not is_open, is_installed
"""

from __future__ import annotations

import functools
import sys
from abc import ABC
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, Protocol

import torch

from ..system.entered_code import PACKAGES, is_watched
from ..system.own_attributes import file_of

# Objects whose insides change without a meaning for forward, or are told of elsewhere, as generators.
STATELESS = ("torch", "memgraph", "passes", "random")
STATEFUL = ("torch.distributions.transforms", "torch.nn.utils.")  # of torch: transforms, and hooks for weights
PLAIN = (object, ABC, Generic, Protocol)  # bases that have no attributes of their own


def is_open(kind: type) -> bool:
    """Return True for a class whose attributes may count: one of the user's, or of an installed package."""
    return not is_library(module_of(kind))


@functools.lru_cache(4096)
def tells_reads(kind: type) -> bool:
    """Return True for a class of the user's whose objects can tell which of their attributes are read.

    Methods that are written in C, as those of other bases, read them unseen.
    """
    is_plain = getattr(kind, "__getattribute__", None) is object.__getattribute__
    return is_plain and all(not is_installed(base) or base in PLAIN for base in kind.__mro__)


def is_installed(thing: Any) -> bool:
    """Return True for what belongs to torch, to Python's library or to what a package manager has installed."""
    name = module_of(thing)
    return is_library(name) or is_package_file(_file(name))


def is_package_file(file: Path) -> bool:
    """Return True for a file that a package manager has put there."""
    return any(part in PACKAGES for part in file.parts)


def module_of(thing: Any) -> str:
    """Return the name of the file that defines a class or a function; empty in a namespace without a name."""
    return str((thing.__name__ if isinstance(thing, ModuleType) else thing.__module__) or "")


@functools.cache
def is_library(name: str) -> bool:
    if name == "builtins" or name in sys.builtin_module_names:
        return True
    file = file_of(name)
    if file is None:  # a built-in part of a package, or the session
        return name.partition(".")[0] in sys.stdlib_module_names and name != "__main__"
    return not is_watched(file)


def _file(name: str) -> Path:
    for each in (name, name.partition(".")[0]):
        if file := file_of(each):
            return Path(file)
    return Path()


def is_configuration(thing: Any) -> bool:
    return isinstance(thing, getattr(sys.modules.get("transformers.configuration_utils"), "PretrainedConfig", ()))


def is_from_torch(thing: Any) -> bool:
    """Optimizers, handles of hooks, process groups: their insides change, and forward does not read them."""
    kind = type(thing)
    return kind.__module__.partition(".")[0] == "torch" and kind is not torch.Size and not has_own_state(kind)


def has_own_state(kind: type) -> bool:
    """Return True for a class of a library whose objects are read by its own code, as the user's are by theirs."""
    name = module_of(kind)
    return name.startswith(STATEFUL) or name.partition(".")[0] not in STATELESS
