"""Watch what one trace of forward does to Python's state.

with python.running(): forward    ->    python.counters, for numbers with which forward only counts
python.end(values)                ->    python.changed, numbers that it needs; python.after, all that it leaves
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from ...graph.counters import Counter
from ...guards.attribute_snapshot import AttributeSnapshot
from ...guards.attribute_writes import AttributeWrites, attribute_writes
from .counted_numbers import ChangedNumbers, Place, counting, take_back_numbers
from .refuse_iterators import refuse_iterators


class WatchedPython:
    """Watches a trace of a module; objects stand for its `counted` numbers."""

    def __init__(self, module: nn.Module, before: AttributeSnapshot, counted: Sequence[Place]) -> None:
        self.module, self.before, self.counted = module, before, counted
        self.counters: list[Counter] = []
        self.changed: ChangedNumbers | None = None
        self.after = before

    @contextmanager
    def running(self) -> Iterator[None]:
        """Watch forward, and what of it a function's backward runs again.

        Raises:
            CaptureError: it takes something from an iterator.
        """
        with counting(self.counted, self.counters), refuse_iterators(self.before):
            yield

    def end(self, values: Sequence[Tensor]) -> None:
        """Put back changed numbers, and keep what the trace has left.

        Raises:
            CaptureError: a traced tensor is left in the module.
        """
        self.changed = take_back_numbers(self.before)
        self.before.refuse_leaks(set(map(id, values)))
        self.after = AttributeSnapshot(self.module, values, self.before.outer.ran)

    def writes(self, has_floats: bool) -> AttributeWrites:
        """Return what forward writes to attributes; nothing where floats are inputs, whose traces other calls use."""
        return AttributeWrites() if has_floats else attribute_writes(self.before, self.after)
