"""Which step is good for a call whose floats are others than those of the call for which it was made.

guards of model(x, 0.1) and model(x, 0.2)   ->   the float differs: it may be an input
the guard with that float left open         ->   the step that takes it, whatever it is
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable, MutableMapping
from typing import Any

from .attributes import Attributes
from .capture import Captured
from .captures import Captures
from .float_capture import FloatTrial
from .float_inputs import ATTRIBUTES, GIVEN, Floats, Place
from .step import Step

PARTS = (GIVEN, ATTRIBUTES)
OPEN = (float, None)  # in the place of a float that is an input
KEPT = 64  # kinds of calls of which it is known that their floats are constants
TRIES = 2  # a first value may have been a special case of a formula, as 1.0 is

Key = Any  # ((guard, groups), whether gradients are there, what backward starts from)
Steps = MutableMapping[Key, Step]


class FloatKeys:
    """What is known of the floats of one module's calls: which are inputs of a step, and which can't be."""

    def __init__(self, attributes: Attributes, captures: Captures) -> None:
        self.attributes, self.captures = attributes, captures
        self._open: list[tuple[Place, ...]] = []
        self._failures: OrderedDict[Hashable, int] = OrderedDict()

    def found(self, key: Key, steps: Steps) -> tuple[Key, list[float]]:
        """The key of a step that is good for a call, or of one that shares its capture, and the floats to give it; the
        call's own key, if there is none."""
        if key not in steps:
            for places in self._open:
                other = _opened(key, places)
                there = steps.get(other) or steps.get((other[0], not other[1], other[2]))
                known = there or self.captures.get((other[0], other[2]))
                floats = _computed(key, known.captured) if known is not None else None
                if floats is not None:
                    return other, floats
        return key, []

    def kept(self, call: Key, key: Key, step: Step, steps: Steps) -> tuple[Key, list[float]]:
        """Keep a step that was made for a call, in the place of those that it can do the work of."""
        opened = tuple(step.captured.opened)
        floats = _computed(call, step.captured) if opened else []
        if opened and floats is not None:
            key = _opened(call, opened)
            if opened not in self._open:
                self._open.append(opened)
            for other in [other for other in steps if other != key and _opened(other, opened) == key]:
                del steps[other]
        steps[key] = step
        return key, floats or []

    def trial(self, key: Key, steps: Steps) -> FloatTrial | None:
        """The floats that may be inputs of the step for a call: those that alone differ from the likest of calls."""
        found: tuple[Place, ...] = ()
        like: tuple[Key, Captured] | None = None
        known = [((other[0], other[2]), step.captured) for other, step in reversed(list(steps.items()))]
        for other, captured in (*known, *self.captures.items()):
            places = _differing(key, other) if (other[0][1], other[1]) == (key[0][1], key[2]) else ()
            if places and (not found or len(places) < len(found)):
                found, like = places, (other, captured)
        if like is None or self._failures.get(_opened(key, found), 0) >= TRIES:
            return None
        its, captured = like
        if set(found) <= captured.opened.keys():
            return None  # a value that would make another graph
        held = {place: self.attributes.floats.get(place[1]) for place in found if place[0] == ATTRIBUTES}
        values = _values(key, found)
        if any(at is None or repr(at[0].get(at[1])) != repr(values[place]) for place, at in held.items()):
            return None
        floats = Floats(values, {place: at for place, at in held.items() if at is not None})
        return FloatTrial(floats, captured, {**_values(its, found), **captured.opened})

    def failed(self, key: Key, trial: FloatTrial) -> None:
        """Those floats of a call like this can't be inputs, or could not this time."""
        kind = _opened(key, tuple(trial.floats.values))
        self._failures[kind] = TRIES if trial.needed else self._failures.get(kind, 0) + 1
        while len(self._failures) > KEPT:
            self._failures.popitem(last=False)


def _computed(key: Key, captured: Captured) -> list[float] | None:
    """The floats that a graph takes of a call; None if their values would make another graph, or Python can't compute
    with them, or makes another type of them."""
    values = _values(key, tuple(captured.opened))
    try:
        floats = [node.compute(values) for node in captured.floats]
        if any(node.compute(values) == number for node, number in captured.special):
            return None
    except (ArithmeticError, ValueError):
        return None
    return floats if all(type(value) is float for value in floats) else None


def _differing(key: Key, other: Key) -> tuple[Place, ...]:
    """The places in which two guards have different floats, or one has it open; none if anything else differs."""
    mine, its = key[0][0], other[0][0]
    if any(mine[part] != its[part] for part in range(len(mine)) if part not in PARTS):
        return ()
    found: list[Place] = []
    for part in PARTS:
        if len(mine[part]) != len(its[part]):
            return ()
        for index, (one, another) in enumerate(zip(mine[part], its[part], strict=True)):
            if one is another or one == another:
                continue
            if not (_is_float(one) and _is_float(another)):
                return ()
            found.append((part, index))
    return tuple(found)


def _opened(key: Key, places: Collection[Place]) -> Key:
    """The key with these floats left open."""
    (guard, groups), *rest = key
    parts = list(guard)
    for part in {part for part, _ in places}:
        entries = list(guard[part])
        for index in (index for its, index in places if its == part and index < len(entries)):
            entries[index] = OPEN if _is_float(entries[index]) else entries[index]
        parts[part] = tuple(entries)
    return ((tuple(parts), groups), *rest)


def _values(key: Key, places: Collection[Place]) -> dict[Place, float]:
    """The floats of a call in these places, but for those that are open."""
    entries = {(part, index): key[0][0][part][index] for part, index in places}
    return {place: float(entry[1]) for place, entry in entries.items() if entry != OPEN}


def _is_float(entry: object) -> bool:
    return isinstance(entry, tuple) and len(entry) == 2 and entry[0] is float
