"""Find the step that fits a call whose floats differ from those of the call it was made for.

keys of model(x, 0.1) and model(x, 0.2)   ->   the float differs, and may be an input
the key without the value of that float   ->   the step that takes any value
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Collection, Hashable, MutableMapping
from typing import Any

from ..capture.floats.float_capture import FloatCapture
from ..capture.floats.float_inputs import FloatInputs
from ..graph.captured import Captured
from ..guards.attribute_guard import AttributeGuard
from ..guards.signature import ARGUMENTS, ATTRIBUTES
from ..runtime.step import Step
from ..tensors.traced_number import FloatPlace
from .capture_cache import CaptureCache

PARTS = (ARGUMENTS, ATTRIBUTES)
ANY_FLOAT = (float, None)  # the entry of a float that is an input
FAILED_KINDS = 64  # kinds of calls that are remembered because their floats have to be constants
TRIES = 2  # a first value may have been special in a formula, as 1.0 is
LOG = logging.getLogger(__name__)

Key = Any  # ((guard, optimizer key), whether gradients exist, outputs that backward starts from)
Steps = MutableMapping[Key, Step]


class FloatKeys:
    """The floats of one module's calls: those that are inputs of a step, and those that can't be."""

    def __init__(self, attributes: AttributeGuard, captures: CaptureCache) -> None:
        self.attributes, self.captures = attributes, captures
        self._places: list[tuple[FloatPlace, ...]] = []  # of floats that are inputs of a step
        self._failures: OrderedDict[Hashable, int] = OrderedDict()

    def lookup(self, key: Key, steps: Steps) -> tuple[Key, list[float]]:
        """Return the key of a step, or of a capture, that fits a call with this key, and the floats that it takes.

        Without any it is the call's own key.
        """
        if key not in steps:
            for places in self._places:
                general = _generalized(key, places)
                step = steps.get(general) or steps.get((general[0], not general[1], general[2]))
                captured = step.parts.captured.unsliced if step else self.captures.get((general[0], general[2]))
                floats = _input_values(key, captured) if captured is not None else None
                if floats is not None:
                    return general, floats
        return key, []

    def add(self, call: Key, key: Key, step: Step, steps: Steps) -> tuple[Key, list[float]]:
        """Add the step of a call to `steps`, in place of those that it can replace; return its key and floats."""
        places = tuple(step.parts.captured.float_values)
        floats = _input_values(call, step.parts.captured) if places else []
        if places and floats is not None:
            key = _generalized(call, places)
            if places not in self._places:
                self._places.append(places)
            for other in [other for other in steps if other != key and _generalized(other, places) == key]:
                del steps[other]
        steps[key] = step
        return key, floats or []

    def capture_for(self, key: Key, steps: Steps) -> FloatCapture | None:
        """Return a capture of a call in which those floats are inputs that alone differ from the most similar call;
        None if there is no such call, or their values are needed."""
        places: tuple[FloatPlace, ...] = ()
        similar: tuple[Key, Captured] | None = None
        known = [((other[0], other[2]), step.parts.captured.unsliced) for other, step in reversed(list(steps.items()))]
        for other, captured in (*known, *self.captures.items()):
            differing = _differing(key, other) if (other[0][1], other[1]) == (key[0][1], key[2]) else ()
            if differing and (not places or len(differing) < len(places)):
                places, similar = differing, (other, captured)
        if similar is None or self._failures.get(_generalized(key, places), 0) >= TRIES:
            return None
        similar_key, captured = similar
        if set(places) <= captured.float_values.keys():
            return None  # a special value, which makes another graph
        containers = {place: self.attributes.floats.get(place[1]) for place in places if place[0] == ATTRIBUTES}
        values = _values(key, places)
        if any(at is None or repr(at[0].get(at[1])) != repr(values[place]) for place, at in containers.items()):
            return None
        inputs = FloatInputs(values, {place: at for place, at in containers.items() if at is not None})
        return FloatCapture(inputs, captured, {**_values(similar_key, places), **captured.float_values})

    def are_inputs(self, key: Key, capture: FloatCapture, step: Step) -> bool:
        """Return True if the floats are inputs of the step that was planned with this capture; log why they are not."""
        if step.parts.captured.float_values:
            return True
        kind = _generalized(key, tuple(capture.inputs.values))
        self._failures[kind] = TRIES if capture.reason else self._failures.get(kind, 0) + 1
        while len(self._failures) > FAILED_KINDS:
            self._failures.popitem(last=False)
        LOG.info("floats stay constants of the graph: %s", capture.reason or "the value of the earlier call is special")
        return False


def _input_values(key: Key, captured: Captured) -> list[float] | None:
    """Return the floats that a graph takes of a call; None if their values would make another graph, or Python can't
    compute with them, or computes another type."""
    values = _values(key, tuple(captured.float_values))
    try:
        floats = [node.compute(values) for node in captured.floats]
        if any(node.compute(values) == number for node, number in captured.special_values):
            return None
    except (ArithmeticError, ValueError):
        return None
    return floats if all(type(value) is float for value in floats) else None


def _differing(key: Key, other: Key) -> tuple[FloatPlace, ...]:
    """Return the places where two guards have different floats, or one takes any; none if anything else differs."""
    guard, other_guard = key[0][0], other[0][0]
    if any(guard[part] != other_guard[part] for part in range(len(guard)) if part not in PARTS):
        return ()
    places: list[FloatPlace] = []
    for part in PARTS:
        if len(guard[part]) != len(other_guard[part]):
            return ()
        for index, (entry, other_entry) in enumerate(zip(guard[part], other_guard[part], strict=True)):
            if entry is other_entry or entry == other_entry:
                continue
            if not (_is_float(entry) and _is_float(other_entry)):
                return ()
            places.append((part, index))
    return tuple(places)


def _generalized(key: Key, places: Collection[FloatPlace]) -> Key:
    """Return the key with any float in these places."""
    (guard, optimizer), *rest = key
    parts = list(guard)
    for part in {part for part, _ in places}:
        entries = list(guard[part])
        for index in (index for in_part, index in places if in_part == part and index < len(entries)):
            entries[index] = ANY_FLOAT if _is_float(entries[index]) else entries[index]
        parts[part] = tuple(entries)
    return ((tuple(parts), optimizer), *rest)


def _values(key: Key, places: Collection[FloatPlace]) -> dict[FloatPlace, float]:
    """Return the floats of a call in these places, without those that may be any."""
    entries = {(part, index): key[0][0][part][index] for part, index in places}
    return {place: float(entry[1]) for place, entry in entries.items() if entry != ANY_FLOAT}


def _is_float(entry: object) -> bool:
    return isinstance(entry, tuple) and len(entry) == 2 and entry[0] is float
