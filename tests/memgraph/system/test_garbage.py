"""Planning collects what it makes itself, and leaves the caller's objects to the caller."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from memgraph.system import garbage
from memgraph.system.garbage import collecting_new_objects


class Node:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _nothing_frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The tests freeze all that they import, and don't count it again."""
    monkeypatch.setattr(garbage, "count_frozen", gc.get_freeze_count)
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    yield
    if frozen:
        gc.freeze()


@pytest.mark.long
def test_only_what_the_block_makes_is_collected_in_it() -> None:
    gc.disable()
    old = weakref.ref(Node())
    gc.enable()
    with collecting_new_objects():
        new = weakref.ref(Node())
        gc.collect()
        assert new() is None and old() is not None
    gc.collect()
    assert old() is None and gc.get_freeze_count() == 0


def test_what_the_caller_has_frozen_stays_frozen() -> None:
    gc.freeze()
    with collecting_new_objects():
        pass
    assert gc.get_freeze_count()


def test_an_error_ends_it() -> None:
    with pytest.raises(KeyError), collecting_new_objects():
        raise KeyError
    assert gc.get_freeze_count() == 0
