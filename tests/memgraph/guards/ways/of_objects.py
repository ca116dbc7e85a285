"""Objects that a global names, and what forward reads of them."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import operator
import types
from collections.abc import Callable
from typing import Any, NamedTuple

from .way import Called, Settings, Slotted, changing, of, setting

SETTINGS, ARGS, SPACE = Settings(), argparse.Namespace(scale=2), types.SimpleNamespace(a=types.SimpleNamespace(b=2))


@of("objects")
def _() -> Any:
    """an attribute"""
    SETTINGS.scale = 2
    return lambda m, x: x * SETTINGS.scale, lambda: setattr(SETTINGS, "scale", 3)


@dataclasses.dataclass
class Choice:
    """Is matched by position."""

    mode: str
    scale: int


CHOICE = Choice("plain", 2)


@of("objects")
def _() -> Any:
    """what a `case` with positional patterns binds"""
    CHOICE.scale = 2

    def then(m: Any, x: Any) -> Any:
        match CHOICE:
            case Choice("plain", scale):
                return x * scale
            case _:
                return x

    return then, lambda: setattr(CHOICE, "scale", 3)


@of("objects")
def _() -> Any:
    """what a `case` with positional patterns compares"""
    CHOICE.mode = "plain"

    def then(m: Any, x: Any) -> Any:
        match CHOICE:
            case Choice("plain"):
                return x * 2
            case _:
                return x

    return then, lambda: setattr(CHOICE, "mode", "other")


@of("objects")
def _() -> Any:
    """a field of a text, as in `"{0.scale}".format(settings)`"""
    SETTINGS.scale = 2
    return lambda m, x: x * int(f"{SETTINGS.scale}"), lambda: setattr(SETTINGS, "scale", 3)


@of("objects")
def _() -> Any:
    """an attribute that a method reads"""
    SETTINGS.scale = 2
    return lambda m, x: x * SETTINGS.doubled(), lambda: setattr(SETTINGS, "scale", 3)


@of("objects")
def _() -> Any:
    """an attribute that a property reads"""
    SETTINGS.scale = 2
    return lambda m, x: x * SETTINGS.tripled, lambda: setattr(SETTINGS, "scale", 3)


@of("objects")
def _() -> Any:
    """an attribute of the command line's arguments"""
    ARGS.scale = 2
    return lambda m, x: x * ARGS.scale, lambda: setattr(ARGS, "scale", 3)


@of("objects")
def _() -> Any:
    """an attribute of an attribute"""
    SPACE.a.b = 2
    return lambda m, x: x * SPACE.a.b, lambda: setattr(SPACE.a, "b", 3)


@of("objects")
def _() -> Any:
    """an attribute that was not there, read by `getattr`"""
    vars(SETTINGS).pop("other", None)
    return lambda m, x: x * getattr(SETTINGS, "other", 1), lambda: setattr(SETTINGS, "other", 3)


@of("objects")
def _() -> Any:
    """an attribute by a computed name"""
    SETTINGS.scale = 2
    return lambda m, x: x * getattr(SETTINGS, "sc" + "ale" * len(x.shape[:1])), lambda: setattr(SETTINGS, "scale", 3)


@of("objects")
def _() -> Any:
    """an attribute by `vars`"""
    SETTINGS.scale = 2
    return lambda m, x: x * vars(SETTINGS)["scale"], lambda: setattr(SETTINGS, "scale", 3)


@of("objects")
def _() -> Any:
    """an attribute by `operator.attrgetter`"""
    SETTINGS.scale = 2
    get = operator.attrgetter("scale")
    return lambda m, x: x * get(SETTINGS), lambda: setattr(SETTINGS, "scale", 3)


SLOTTED = Slotted()


@of("objects")
def _() -> Any:
    """a slot"""
    SLOTTED.scale = 2
    return lambda m, x: x * SLOTTED.scale, lambda: setattr(SLOTTED, "scale", 3)


@dataclasses.dataclass
class Options:
    scale: int = 2
    items: list[int] = dataclasses.field(default_factory=lambda: [1])


OPTIONS = Options()


@of("objects")
def _() -> Any:
    """a field of a dataclass"""
    OPTIONS.scale = 2
    return lambda m, x: x * OPTIONS.scale, lambda: setattr(OPTIONS, "scale", 3)


@of("objects")
def _() -> Any:
    """a list in a field of a dataclass"""
    OPTIONS.items = [1]
    return lambda m, x: x * sum(OPTIONS.items), lambda: OPTIONS.items.append(5)


@of("objects")
def _() -> Any:
    """a default of a dataclass that forward makes"""

    def change() -> Callable[[], None]:
        before = Options.__init__.__defaults__
        Options.__init__.__defaults__ = (5, *(before or ())[1:])
        return lambda: setattr(Options.__init__, "__defaults__", before)

    return lambda m, x: x * Options().scale, change


class Mode(enum.Enum):
    ONE = 1
    TWO = 2


MODE = Mode.ONE


@of("objects")
def _() -> Any:
    """a member of an enum"""
    return lambda m, x: x * MODE.value, changing("MODE", Mode.TWO)


class Point(NamedTuple):
    a: int
    b: int


POINT = Point(1, 2)


@of("objects")
def _() -> Any:
    """a named tuple"""
    return lambda m, x: x * POINT.b, changing("POINT", Point(1, 3))


CALLED = Called()


@of("objects")
def _() -> Any:
    """an object that is called"""
    CALLED.scale = 2
    return lambda m, x: CALLED(x), lambda: setattr(CALLED, "scale", 3)


class Indexed:
    def __init__(self) -> None:
        self.values = {"a": 2}

    def __getitem__(self, name: str) -> int:
        return self.values[name]

    def __getattr__(self, name: str) -> int:
        if name.startswith("__") or "values" not in vars(self):
            raise AttributeError(name)
        return self.values[name]


INDEXED = Indexed()


@of("objects")
def _() -> Any:
    """an object's `__getitem__`"""
    INDEXED.values["a"] = 2
    return lambda m, x: x * INDEXED["a"], lambda: INDEXED.values.update(a=3)


@of("objects")
def _() -> Any:
    """an object's `__getattr__`"""
    INDEXED.values["a"] = 2
    return lambda m, x: x * INDEXED.a, lambda: INDEXED.values.update(a=3)


class Own(dict[str, int]):
    pass


OWN = Own(a=2)


@of("objects")
def _() -> Any:
    """a dict of a class of its own"""
    OWN["a"] = 2
    return lambda m, x: x * OWN["a"], lambda: OWN.update(a=3)


class Deep:
    def __init__(self) -> None:
        self.inner = types.SimpleNamespace(more=types.SimpleNamespace(scale=2))


DEEP = Deep()


@of("objects")
def _() -> Any:
    """an object three deep, handed to a function"""
    DEEP.inner.more.scale = 2

    def scale_of(deep: Any) -> int:
        return int(deep.inner.more.scale)

    return lambda m, x: x * scale_of(DEEP), lambda: setattr(DEEP.inner.more, "scale", 3)


@of("objects")
def _() -> Any:
    """a method that is replaced in its class"""
    return lambda m, x: x * SETTINGS.doubled(), setting(Settings, "doubled", lambda self: 7)


@of("objects")
def _() -> Any:
    """a method that is replaced in the object"""

    def change() -> Any:
        vars(SETTINGS)["doubled"] = lambda: 9
        return lambda: [vars(SETTINGS).pop("doubled")]

    return lambda m, x: x * SETTINGS.doubled(), change


HELD = types.SimpleNamespace(rows=range(0, 9, 4), table={1: 0.5})


@of("objects")
def _() -> Any:
    """the end of a range with the same items"""
    return lambda m, x: x * HELD.rows.stop, setting(HELD, "rows", range(0, 12, 4))


@of("objects")
def _() -> Any:
    """the type of a key of a dict"""
    return lambda m, x: x * len(str([*HELD.table])), setting(HELD, "table", {True: 0.5})


@of("objects")
def _() -> Any:
    """a field of a text that is in a list"""
    SETTINGS.scale, texts = 2, ["{c.scale}"]
    return lambda m, x: x * float(texts[0].format(c=SETTINGS)), lambda: setattr(SETTINGS, "scale", 3)


@of("objects")
def _() -> Any:
    """an attribute that `object.__getattribute__` reads by a name in a list"""
    SETTINGS.scale, names = 2, ["scale"]
    return lambda m, x: x * object.__getattribute__(SETTINGS, names[0]), lambda: setattr(SETTINGS, "scale", 3)


ORDERED = types.SimpleNamespace()


@of("objects")
def _() -> Any:
    """the order of attributes, in a loop over `vars()`"""
    vars(ORDERED).clear()
    ORDERED.add, ORDERED.mul = 1.0, 2.0

    def then(m: Any, x: Any) -> Any:
        for name, value in vars(ORDERED).items():
            x = x + value if name == "add" else x * value
        return x

    return then, lambda: setattr(ORDERED, "add", vars(ORDERED).pop("add"))


class WithSlot(Slotted):
    """Has a slot, and a `__dict__` as well."""


SLOT = WithSlot()


@of("objects")
def _() -> Any:
    """a slot of an object that has other attributes too"""
    return lambda m, x: x * SLOT.scale, setting(SLOT, "scale", 3)


class Entries(dict[str, int]):
    __slots__ = ()
    __getattr__ = dict.__getitem__


ENTRIES: Any = Entries(scale=2)


@of("objects")
def _() -> Any:
    """a dict whose entries are attributes, and that raises KeyError for others"""
    return lambda m, x: x * ENTRIES.scale, lambda: ENTRIES.update(scale=3)
