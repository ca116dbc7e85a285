"""Captures of dropped steps, for calls that come again: tracing takes most of the time of such a call.

a step is dropped        ->   its graph stays, without what runs it and without slots in the tier
the same call comes      ->   it is priced, planned and partitioned, but not traced
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from passes import Plan, Trace

from ..capture.sizes.later_graph import LaterGraph
from ..graph.captured import Captured
from ..runtime.step import Step
from .lengths.general_steps import GeneralSteps

NODES = 10_000  # of all graphs that are kept


@dataclass(frozen=True, eq=False)
class EarlierCapture:
    """A capture of the same call, and a plan that fits when it adds to gradients.

    Attributes:
        all_outputs: bytes that backward from all outputs needs, if they are too many and it starts from scalars alone.
    """

    captured: Captured
    accumulated_plan: Plan | None = None
    all_outputs: int = 0

    @classmethod
    def of(cls, step: Step) -> EarlierCapture:
        return cls(step.parts.captured.unsliced, step.parts.accumulated_plan, step.report.all_outputs)


@dataclass(frozen=True, eq=False)
class KnownLength:
    """The capture with symbols that serves a call; stands where a call is captured.

    Attributes:
        lengths: by symbol, in this call.
        nearby: the priced trace of the same ops with another length.
    """

    general: GeneralSteps
    lengths: Sequence[int]
    nearby: Trace | None

    def __call__(self, *call: Any) -> Captured:
        return self.general.capture.at(self.lengths)


def with_guard(key: Any, grown: Callable[[Any], Hashable]) -> Any:
    """Return a key that begins with `(guard, ...)` with another guard."""
    (guard, *state), *rest = key
    return ((grown(guard), *state), *rest)


class CaptureCache:
    """Captures by what they depend on; the least recently dropped goes first."""

    def __init__(self) -> None:
        self._captures: OrderedDict[Hashable, Captured] = OrderedDict()

    def __len__(self) -> int:
        return len(self._captures)

    def add(self, key: Hashable, captured: Captured) -> None:
        """Keep a capture, and drop old ones beyond the limit; not one that a capture with symbols gives again."""
        if isinstance(captured.graph, LaterGraph) and not captured.graph.is_made:
            return
        self._captures.pop(key, None)
        self._captures[key] = captured
        while sum(len(kept.graph.graph.nodes) for kept in self._captures.values()) > NODES:
            self._captures.popitem(last=False)

    def rekey(self, grown: Callable[[Any], Hashable]) -> None:
        """Replace the guards in all keys."""
        self._captures = OrderedDict((with_guard(key, grown), kept) for key, kept in self._captures.items())

    def items(self) -> list[tuple[Any, Captured]]:
        """Return all captures, the latest first."""
        return list(reversed(self._captures.items()))

    def get(self, key: Hashable) -> Captured | None:
        """Return the capture of such a call."""
        return self._captures.get(key)

    def take(self, key: Hashable) -> EarlierCapture | None:
        """Remove and return the capture of such a call, which belongs to its step from now on."""
        captured = self._captures.pop(key, None)
        return EarlierCapture(captured) if captured is not None else None
