"""Items of a dict are looked at again once the dict was written to, in any way."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import pytest
from torch import nn

from memgraph.guards import checks
from memgraph.guards.checks import ReadDicts, items_of


class Plain:
    def __init__(self) -> None:
        self.scale, self.other = 1.5, "x"


def store(thing: Any, value: object) -> None:
    thing.scale = value


def made(kind: Callable[[], Any]) -> tuple[Any, ReadDicts]:
    thing, reads = kind(), ReadDicts()
    thing.scale, thing.other = 1.5, "x"
    reads.add(vars(thing), itemgetter("scale", "other"), is_of_object=True)
    assert not reads.have_changed()
    return thing, reads


def often(thing: Any) -> None:
    for value in range(10_000):  # Python has compiled the store for this class by then
        store(Plain(), value)
    store(thing, 2.5)


WRITES: dict[str, Callable[[Any], object]] = {
    "an attribute": lambda thing: setattr(thing, "scale", 2.5),
    "in a function that is hot": often,
    "equal, but another object": lambda thing: store(thing, float("1.5")),
    "past the class": lambda thing: object.__setattr__(thing, "scale", 2.5),
    "in the dict": lambda thing: vars(thing).update(scale=2.5),
    "a new attribute": lambda thing: setattr(thing, "new", 1),
    "both exchanged": lambda thing: vars(thing).update(scale=thing.other, other=thing.scale),
}


@pytest.mark.parametrize("kind", [Plain, lambda: nn.Linear(2, 2)], ids=["object", "module"])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_is_seen(kind: Callable[[], Any], write: str) -> None:
    thing, reads = made(kind)
    WRITES[write](thing)
    assert reads.have_changed()


@pytest.mark.parametrize(
    "write", [lambda d: d.update(a=1), lambda d: d.__ior__({"a": 1}), lambda d: d.setdefault("a", 1)]
)
def test_a_dict_that_was_empty_is_seen_to_be_filled(write: Callable[[dict[str, int]], object]) -> None:
    table, reads = dict[str, int](), ReadDicts()
    reads.add(table, lambda mapping: (*mapping, *mapping.values()))
    assert not reads.have_changed()
    write(table)
    assert reads.have_changed()


@pytest.mark.parametrize("kind", [Plain, lambda: nn.Linear(2, 2)], ids=["object", "module"])
def test_an_attribute_that_is_gone_is_a_change(kind: Callable[[], Any]) -> None:
    thing, reads = made(kind)
    del thing.scale
    thing.third = 1.5
    assert reads.have_changed()


@pytest.mark.parametrize("kind", [Plain, lambda: nn.Linear(2, 2)], ids=["object", "module"])
def test_another_order_of_attributes_is_a_change_but_for_those_that_are_left_out(kind: Callable[[], Any]) -> None:
    thing = kind()
    thing.scale, thing.other, thing.left = 1.5, "x", 0
    reads = ReadDicts()
    reads.add(vars(thing), items_of(("scale", "other")), is_of_object=True, ignored=("left",))
    thing.left = vars(thing).pop("left")
    del thing.left
    assert not reads.have_changed()
    thing.scale = vars(thing).pop("scale")
    assert reads.have_changed()


def test_what_is_not_read_and_what_is_put_back_does_not_count() -> None:
    thing, reads = made(lambda: nn.Linear(2, 2))
    before = thing.scale
    thing.in_features = 7
    thing.scale = 2.5
    thing.scale = before
    assert not reads.have_changed() and not reads.have_changed()
    thing.scale = 2.5
    assert reads.have_changed() and reads.have_changed()


def test_a_dict_that_was_not_written_to_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    read, reads, mapping = list[int](), ReadDicts(), {"a": 1}

    def noted(found: dict[str, int]) -> tuple[Any, ...]:
        read.append(1)
        return (*found.values(),)

    reads.add(mapping, noted)
    count = len(read)
    assert not reads.have_changed() and len(read) == count
    mapping["a"] = 2
    assert reads.have_changed() and len(read) == count + 1
    monkeypatch.setattr(checks, "SEES_ATTRIBUTES", False)
    slow = ReadDicts()
    slow.add(mapping, noted, is_of_object=True)
    count = len(read)
    assert not slow.have_changed() and len(read) == count + 1
