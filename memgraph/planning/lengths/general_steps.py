"""The steps with symbols of one capture, which steps of single lengths are made of.

no gradients exist, no hooks     ->   its graph, and the one that adds to gradients
gradients exist                  ->   the graph that adds to them
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from ...capture.sizes.size_capture import GeneralCapture
from ...graph.captured import Captured
from .general_graph import GeneralGraph

KEPT = 2


@dataclass(frozen=True, eq=False)
class GeneralStep:
    """The capture of a step with symbols, its graph, and that of the step once gradients exist."""

    captured: Captured
    graph: GeneralGraph
    later: GeneralGraph | None


class GeneralSteps:
    """The steps of a capture with symbols, by what they depend on besides the call; the latest are kept."""

    def __init__(self, capture: GeneralCapture) -> None:
        self.capture = capture
        self._steps: OrderedDict[Hashable, GeneralStep] = OrderedDict()

    def step(self, key: Hashable, make: Callable[[GeneralCapture], GeneralStep]) -> GeneralStep:
        """Return the step that is kept for this key, or the one that is made now."""
        if key not in self._steps:
            self._steps[key] = make(self.capture)
            while len(self._steps) > KEPT:
                self._steps.popitem(last=False)
        self._steps.move_to_end(key)
        return self._steps[key]
