"""Find the step of a call whatever the numbers are that forward counts with.

key with calls = 7   ->   key with calls = any int, if a step has it
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch import nn

from ..graph.counters import Counter
from ..guards.attribute_guard import AttributeGuard
from ..guards.signature import ATTRIBUTES

CALLS = 256  # kinds of calls that are remembered

Key = Any  # ((guard, (optimizer key, answers)), whether gradients exist, outputs that backward starts from)


class CounterKeys:
    """The kinds of one module's calls that count."""

    def __init__(self, attributes: AttributeGuard) -> None:
        self._attributes = attributes
        self._known: OrderedDict[Hashable, tuple[int, ...]] = OrderedDict()  # by guard: places of the numbers

    def rekey(self, grown: Callable[[Any], Hashable]) -> None:
        """Replace all guards."""
        self._known = OrderedDict((grown(guard), places) for guard, places in self._known.items())

    def general(self, guard: Any) -> Any:
        """Return the guard for any number, if a step was captured for that."""
        for places in dict.fromkeys(self._known.values()):
            general = _for_any(guard, places)
            if general in self._known:
                return general
        return guard

    def add(self, key: Key, counters: Sequence[Counter], module: nn.Module) -> Key:
        """Note that a step was captured for any number of these, and return its key."""
        if not counters:
            return key
        wanted = {(id(vars(module.get_submodule(counter.path))), counter.name) for counter in counters}
        numbers = self._attributes.numbers.items()
        places = tuple(place for place, (container, name) in numbers if (id(container), name) in wanted)
        (guard, state), *rest = key
        general = _for_any(guard, places)
        self._known[general] = places
        while len(self._known) > CALLS:
            self._known.popitem(last=False)
        return ((general, state), *rest)


def _for_any(guard: Any, places: Sequence[int]) -> Any:
    parts, attributes = list(guard), list(guard[ATTRIBUTES])
    for place in places:
        if place < len(attributes) and isinstance(attributes[place], tuple) and attributes[place][0] in (int, float):
            attributes[place] = (attributes[place][0], "any")
    parts[ATTRIBUTES] = tuple(attributes)
    return tuple(parts)
