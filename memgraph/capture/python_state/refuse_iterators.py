"""Refuse what forward takes from an iterator or a file: reading changes such an object, and a step runs no Python.

    mask = next(self.masks)                 a CaptureError that names the model's attribute masks
    for line in FILE: ...                   the same, for a global
    for x in self.layers: ...               allowed: it makes an iterator of its own

Nothing says where such an object of Python's own is, or in which state, so an object takes its place while forward
runs.  One whose class is written in Python has its state in attributes, which are compared elsewhere.
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from types import BuiltinFunctionType, FrameType, FunctionType, MethodType, MethodWrapperType, ModuleType
from typing import Any

from torch import Tensor, nn

from ...errors import CaptureError
from ...guards.attribute_snapshot import AttributeSnapshot
from ...guards.contents import container_of, slots
from ...guards.module_attributes import CONSTANTS, STATE
from ...guards.variable_scope import Scope
from ...system.own_attributes import attributes_of
from ...system.own_generators import OwnStates, is_own, own_generators

CLOSED = (*CONSTANTS, Tensor, nn.Module, type, ModuleType)
BOUND = (BuiltinFunctionType, MethodWrapperType)  # `iterator.__next__`, `generator.send`, `file.readline`
DEPTH, LARGE = 5, 1_000  # how far containers are looked into, and of how many entries
WRITING = frozenset({"write", "writelines", "flush"})  # what a log does to a file that may be read too


def is_changed_by_reading(thing: object) -> bool:
    """Return True for an iterator, or a file that can be read, whose state no attribute has."""
    take = getattr(type(thing), "__next__", None)
    if take is None or (isinstance(take, FunctionType) and not _is_from_torch(thing)):
        return False
    return not isinstance(thing, io.IOBase) or (not thing.closed and thing.readable())


def _is_from_torch(thing: object) -> bool:
    return type(thing).__module__.partition(".")[0] == "torch"


@contextmanager
def refuse_iterators(before: AttributeSnapshot) -> Iterator[None]:
    """Raise if a block takes something from such an object of a module, or of what its code refers to."""
    watch, outer = _Watch(), _Watch(enters_objects=False)  # each of those has a scope of its own
    own = {id(generator) for _, part in before.modules[:1] for generator in own_generators(part).values()}
    drawn: dict[str, Any] = {}

    def note(scopes: Sequence[Scope], functions: Sequence[FunctionType], frame: FrameType) -> None:
        found = {one.title.format(name): value for one in scopes for name, value in one.values().items()}
        found = {label: value for label, value in found.items() if is_own(value) and id(value) not in own}
        drawn.update({label: OwnStates({label: value}) for label, value in found.items() if label not in drawn})
        _replace(watch, outer, scopes, functions, frame)

    try:
        for (path, part), attributes in zip(before.modules, before.attributes, strict=True):
            names = [name for name in attributes if name not in (*STATE, "_modules")]
            watch.replace_items(f"{path}.{{}}".lstrip("."), vars(part), {name: attributes[name] for name in names})
        with before.outer.watching(note):
            _replace(watch, outer, before.outer.ran.scopes, before.outer.ran.functions)
            yield
    finally:
        outer.restore()
        watch.restore()
    if errors := watch.errors or outer.errors:
        raise errors[0]  # forward has caught it
    for label, states in drawn.items():
        if states.changed() is not None:
            states.restore()
            raise CaptureError(
                f"forward draws numbers from {label}, but a captured step runs no Python: each would get what the "
                "first has drawn. Draw them outside of the module, and give them as an argument, or use torch's"
            )


def _replace(
    watch: _Watch, outer: _Watch, scopes: Sequence[Scope], functions: Sequence[FunctionType],
    frame: FrameType | None = None,
) -> None:  # fmt: skip
    """Replace such objects in what code refers to that is entered now; `frame` has its arguments already."""
    for function in functions:
        watch.enter_defaults(function)
        if frame is not None:
            for name in function.__code__.co_varnames[: function.__code__.co_argcount]:
                watch.refuse_replaced(frame.f_locals.get(name))
    for scope in scopes:
        for name, value in scope.values().items():
            outer.write(scope.title.format(name), value, partial(scope.write, name))


class _Watch:
    """Puts others in the place of such objects, and puts these back."""

    def __init__(self, enters_objects: bool = True) -> None:
        self.enters_objects = enters_objects
        self.errors: list[CaptureError] = []
        self._undo: list[Callable[[], object]] = []
        self._seen = set[int]()
        self._refusing: dict[int, _Refusing] = {}  # by the id of what it takes the place of

    def restore(self) -> None:
        for undo in reversed(self._undo):
            undo()

    def write(self, label: str, value: Any, write: Callable[[Any], object], depth: int = 0) -> None:
        """Write what takes the place of a value, if there is such an object in it."""
        if (new := self._replaced(label, value, depth)) is not value:
            write(new)
            self._undo.append(lambda: write(value))

    def replace_items(self, label: str, container: Any, items: dict[Any, Any], depth: int = 0) -> None:
        """Do so for these items of a container, or attributes."""
        for key, value in items.items():
            if (new := self._replaced(label.format(key), value, depth)) is not value:
                container[key] = new
                self._undo.append(partial(_put_back, container, key, new, value))

    def enter_defaults(self, function: FunctionType) -> None:
        """Do so for the defaults of a function."""
        label, given, named = f"a default of {function.__qualname__}", function.__defaults__, function.__kwdefaults__
        self.write(label, given, partial(setattr, function, "__defaults__"), 1)
        self.write(label, named, partial(setattr, function, "__kwdefaults__"), 1)

    def refuse_replaced(self, argument: Any) -> None:
        """Refuse an argument that was replaced where it is a default: the call that runs has it already."""
        if (refusing := self._refusing.get(id(argument))) is not None:
            self.errors.append(refusing.error())

    def _replaced(self, label: str, value: Any, depth: int) -> Any:
        if isinstance(value, CLOSED) or depth > DEPTH or id(value) in self._seen:
            return value
        if is_changed_by_reading(value) or (isinstance(value, BOUND) and is_changed_by_reading(value.__self__)):
            self._refusing[id(value)] = refusing = _Refusing(label, value, self.errors)
            return refusing
        self._seen.add(id(value))
        if isinstance(value, FunctionType):  # what it refers to is replaced once it runs
            return value
        if isinstance(value, MethodType):
            self._replaced(label, value.__self__, depth + 1)
            return value
        if isinstance(value, partial) and type(value) is partial:
            given: Sequence[Any] = value.func, value.args, value.keywords
            new: Sequence[Any] = [self._replaced(label, each, depth + 1) for each in given]
            return value if all(map(_is, new, given)) else partial(new[0], *new[1], **new[2])
        base = container_of(value)
        if base is not None and base.__len__(value) > LARGE:
            return value
        if type(value) is tuple:
            new = tuple(self._replaced(f"{label}[{i}]", item, depth + 1) for i, item in enumerate(value))
            return value if all(map(_is, new, value)) else new
        if base is not None and issubclass(base, dict):
            self.replace_items(f"{label}[{{!r}}]", value, dict(value), depth + 1)
        elif base in (list, deque):
            self.replace_items(f"{label}[{{}}]", value, dict(enumerate(value)), depth + 1)
        elif not self.enters_objects or _is_from_torch(value):
            return value
        else:
            if (inside := attributes_of(value)) is not None:
                self.replace_items(f"{label}.{{}}", inside, dict(inside), depth + 1)
            for name in slots(value):
                if hasattr(value, name):
                    self.write(f"{label}.{name}", getattr(value, name), partial(setattr, value, name), depth + 1)
        return value


class _Refusing:
    """Takes the place of an object that reading changes; what other threads do to it happens."""

    def __init__(self, label: str, thing: Any, errors: list[CaptureError]) -> None:
        self._label, self._thing, self._errors, self._thread = label, thing, errors, get_ident()

    @property  # type: ignore[misc] # so that `isinstance` holds, as it does in eager
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride] # never set
        return type(self._thing)

    def __iter__(self) -> _Refusing:
        return self

    def __next__(self) -> Any:
        return next(self._read())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._read()(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._thing, name)
        return getattr(self._read(), name) if callable(value) and name not in WRITING else value

    def _read(self) -> Any:
        if get_ident() == self._thread:
            self._errors.append(self.error())
            raise self._errors[-1]
        return self._thing

    def error(self) -> CaptureError:
        return CaptureError(
            f"forward reads {self._label} ({_kind(self._thing)}), which changes it, but a captured step runs no "
            "Python: each would get what the first has read. Read it outside of the module, and give the result as an "
            "argument; or keep a list of tensors, and an index in a buffer"
        )


def _kind(thing: object) -> str:
    return f"{type(thing.__self__).__name__}.{thing.__name__}" if isinstance(thing, BOUND) else type(thing).__name__


def _is(one: object, other: object) -> bool:
    return one is other


def _put_back(container: Any, key: Any, new: Any, value: Any) -> None:
    """Undo a replacement, unless forward has put something else there."""
    try:
        if container[key] is new:
            container[key] = value
    except (KeyError, IndexError):
        pass
