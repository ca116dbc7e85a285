"""Generators of `random` and numpy that a module has for itself, and their states at one moment.

    self.rng = numpy.random.default_rng(3)
    before = OwnStates(own_generators(module));  self.rng.random();  before.changed()   ->   "layers.0.rng"
    before.restore()

They are looked for in attributes, in containers and objects there, in attributes of classes, and among the globals and
the closure of each forward.
"""

from __future__ import annotations

import random
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from .own_attributes import attributes_of

MAX_DEPTH = 5
CONTAINERS = (list, tuple, set, frozenset, deque)
CLOSED = (torch.Tensor, nn.Module, type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)


def own_generators(module: nn.Module) -> dict[str, Any]:
    """Return the generators of a module and its submodules by name, those of `random` and `numpy.random` left out."""
    kinds, found, names, seen = _kinds(), dict[int, Any](), dict[str, Any](), set[int]()
    seen.update(map(id, _shared()))
    for path, part in module.named_modules():
        for name, thing in (*_attributes(part), *_of_classes(type(part), seen)):
            label = f"{path}.{name}" if path and not isinstance(thing, _Direct) else name
            for generator in _inside(thing, kinds, seen, 0):
                if found.setdefault(id(generator), generator) is generator:
                    names.setdefault(label, generator)
    return names


def is_own(thing: Any) -> bool:
    """Return True for a generator of `random` or numpy that is not the one of their functions."""
    return isinstance(thing, _kinds()) and not any(thing is each for each in _shared())


class OwnStates:
    """The states of some generators."""

    def __init__(self, generators: Mapping[str, Any]) -> None:
        self.generators = generators
        self._states = {name: _state(generator) for name, generator in generators.items()}

    def changed(self) -> str | None:
        """Return the name of the first generator from which numbers were drawn since."""
        return next((n for n, one in self.generators.items() if not _is_same(_state(one), self._states[n])), None)

    def restore(self) -> None:
        """Set all back."""
        for name, generator in self.generators.items():
            _set_state(generator, self._states[name])


def _shared() -> tuple[Any, ...]:
    """Return the generators of the functions of `random` and `numpy.random`."""
    return getattr(random, "_inst", None), getattr(sys.modules.get("numpy.random.mtrand"), "_rand", None)


def _kinds() -> tuple[type, ...]:
    numpy: Any = getattr(sys.modules.get("numpy"), "random", None)
    of_numpy = (numpy.Generator, numpy.RandomState, numpy.BitGenerator) if numpy is not None else ()
    return (random.Random, *of_numpy)


def _attributes(part: nn.Module) -> list[tuple[str, Any]]:
    return [(name, thing) for name, thing in vars(part).items() if name not in ("_parameters", "_buffers", "_modules")]


def _of_classes(kind: type, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield class attributes, globals and closures of forwards that torch has not written."""
    for each in kind.__mro__:
        if each.__module__.partition(".")[0] in ("torch", "builtins") or id(each) in seen:
            continue
        seen.add(id(each))
        yield from ((name, thing) for name, thing in vars(each).items() if not name.startswith("__"))
        forward = vars(each).get("forward")
        if isinstance(forward, types.FunctionType):
            yield from ((f"{each.__module__}.{name}", _Direct(x)) for name, x in _globals(forward, seen).items())
            cells = zip(forward.__code__.co_freevars, forward.__closure__ or (), strict=True)
            yield from ((name, _Direct(_content(cell))) for name, cell in cells)


class _Direct:
    """A thing that is looked at, but not into."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing


def _globals(forward: types.FunctionType, seen: set[int]) -> dict[str, Any]:
    names = forward.__globals__
    if id(names) in seen:
        return {}
    seen.add(id(names))
    return dict(names)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None


def _inside(thing: Any, kinds: tuple[type, ...], seen: set[int], depth: int) -> Iterator[Any]:
    if isinstance(thing, _Direct):
        if isinstance(thing.thing, kinds) and id(thing.thing) not in seen:
            seen.add(id(thing.thing))
            yield thing.thing
        return
    if type(thing) in (int, float, str, bool, types.NoneType) or id(thing) in seen or depth > MAX_DEPTH:
        return
    seen.add(id(thing))
    if isinstance(thing, kinds):
        yield thing
        return
    if isinstance(thing, CLOSED) or type(thing).__module__.partition(".")[0] == "torch":
        return
    content: Iterable[Any] = (
        thing.values() if isinstance(thing, dict) else thing if isinstance(thing, CONTAINERS) else ()
    )
    for item in (*content, *(attributes_of(thing) or {}).values()):
        yield from _inside(item, kinds, seen, depth + 1)


def _state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return None if isinstance(generator, random.SystemRandom) else generator.getstate()
    if hasattr(generator, "get_state"):
        return generator.get_state(legacy=False)
    return getattr(generator, "bit_generator", generator).state


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        if state is not None:
            generator.setstate(state)
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        getattr(generator, "bit_generator", generator).state = state


def _is_same(now: Any, before: Any) -> bool:
    if isinstance(now, dict):
        return now.keys() == before.keys() and all(_is_same(now[key], before[key]) for key in now)
    same = now == before
    return bool(same.all()) if hasattr(same, "all") else bool(same)
