"""Captures of steps that were let go, for calls that come again: tracing is most of what such a call takes.

a step is let go       ->   its graph stays, without what runs it and without room elsewhere
such a call returns    ->   it is priced, planned and split; nothing is traced
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from passes import Plan

from .capture import Captured
from .step import Step

NODES = 10_000  # of graphs that are kept


@dataclass(frozen=True, eq=False)
class Left:
    """What is left of a step."""

    captured: Captured
    adding: Plan | None = None


Like = Step | Left  # what a step of the same call can take its capture from


class Captures:
    """By what a capture depends on; the one that was let go longest ago goes first."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, Left] = OrderedDict()

    def keep(self, key: Hashable, captured: Captured) -> None:
        """Keep a capture, and let others go that are too many."""
        self._kept.pop(key, None)
        self._kept[key] = Left(captured)
        while sum(len(left.captured.graph.graph.nodes) for left in self._kept.values()) > NODES:
            self._kept.popitem(last=False)

    def items(self) -> list[tuple[Any, Captured]]:
        """All that are kept, the latest first."""
        return [(key, left.captured) for key, left in reversed(self._kept.items())]

    def get(self, key: Hashable) -> Left | None:
        """The capture of such a call."""
        return self._kept.get(key)

    def take(self, key: Hashable) -> Left | None:
        """The same, which belongs to its step from now on."""
        return self._kept.pop(key, None)
