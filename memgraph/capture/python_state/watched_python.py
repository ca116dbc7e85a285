"""Watch what one trace of forward does to Python's state.

python.stored(values)             ->    the tensors that forward has put into attributes
python.end(values, placed)        ->    python.writes, with formulas for numbers with which it only counts; python.after

Find out whether a graph depends on the numbers that forward changes on its module.

    self.calls += 1                      ->   a formula: the graph is the same for any number
    self.calls += 1; x * self.calls      ->   refused, as is whatever else looks at the number

In a second trace, an object stands for each of these numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch._subclasses import FakeTensor

from ...graph.captured import Input
from ...guards.attribute_snapshot import AttributeSnapshot, holds_traced, stored_tensor_error
from ...guards.attribute_writes import AttributeWrite, AttributeWrites, attribute_writes, attributes_with_tensors
from ...guards.outer_snapshot import holds
from ...guards.written_attributes import Attribute, AttributeWatch, HeldNeeded, written_attributes
from ...tensors.counted_number import CountedNumber, Formula, formula_of
from ...tensors.expressions import Variable
from ...tensors.traced_number import is_traced
from .eager_types import eager_types
from .function_caches import refuse_kept_draws
from .refuse_effects import refuse_effects
from .refuse_iterators import refuse_iterators

NUMBERS = (int, float)


class WatchedPython:
    """Watches a trace of a module; objects stand for the numbers that it may count with."""

    def __init__(
        self, module: nn.Module, before: AttributeSnapshot, counted: Sequence[AttributeWrite],
        tried: Iterable[Attribute] = (),
    ) -> None:  # fmt: skip
        """Forward may read the attributes `tried`, or write them first, as all that have tensors."""
        self.module, self.before, self.counted = module, before, counted
        written = written_attributes(module)
        found = (each for each in attributes_with_tensors(before) if each not in written.held)
        self.watch = AttributeWatch([*written.unread, *tried, *found])
        self._formulas: list[AttributeWrite] = []
        self.after = before
        self.writes = AttributeWrites()

    @property
    def changed_numbers(self) -> tuple[AttributeWrite, ...]:
        """The writes of numbers that the next call reads."""
        return changed_numbers(self.writes)

    @property
    def counters(self) -> list[AttributeWrite]:
        """The numbers that follow from the ones before."""
        following = {item.attribute for item in self._formulas if item.follows}
        return [item for item in self.counted if item.attribute in following]

    @contextmanager
    def running(self, roles: Sequence[Input], values: Sequence[Tensor]) -> Iterator[None]:
        """Watch forward, which is given these values, and what of it a function's backward runs again.

        Raises:
            CaptureError: it takes something from an iterator, a cache of a function keeps what it has drawn, or it does
                something to the process or to the values.
            HeldNeeded: it fails, and has read attributes that were known as unread.
        """
        try:
            with (
                counting(self.counted, self._formulas),
                refuse_iterators(self.before),
                refuse_effects(roles, values),
                self.watch.watching(),
                eager_types(),
            ):
                yield
                refuse_kept_draws(self.before)
        except Exception:
            written = written_attributes(self.module)
            if written.note(self.watch.read & written.unread, ()):
                raise HeldNeeded from None
            raise

    def stored(self, values: Sequence[Tensor]) -> list[Any]:
        """Return the traced tensors, and numbers read from these, that forward has put into attributes."""
        after, written = AttributeSnapshot(self.module, values), self.watch.written()
        if not written and not any(holds_traced(after.tokens.get(name)) for name in self.before.changes(after)):
            return []
        writes = attribute_writes(self.before, after, unread=written)
        leaves = (leaf for write in writes.items for leaf in write.leaves)
        return [leaf for leaf in leaves if isinstance(leaf, Tensor) or is_traced(leaf)]

    def end(self, values: Sequence[Tensor], placed: Mapping[int, Any]) -> None:
        """Put back what the trace has changed in attributes, and keep what that was.

        Args:
            placed: what stands for each tensor that forward has stored, by its id.

        Raises:
            CaptureError: another traced tensor is left in the module.
        """
        self.after, unread = AttributeSnapshot(self.module, values, self.before.outer.ran), self.watch.written()
        found = attribute_writes(self.before, self.after, placed, unread)
        self.writes = AttributeWrites((*found.items, *self._formulas)).without_reads(self.watch.not_read())
        written = {item.where for item in self.writes.items}
        for name in self.before.changes(self.after):
            if name not in written and holds(self.after.tokens.get(name), FakeTensor):
                raise stored_tensor_error(name)
        self.before.refuse_tensors({*map(id, values), *placed})
        self.before.restore_attributes()
        self.after.forget_values()


def changed_numbers(writes: AttributeWrites) -> tuple[AttributeWrite, ...]:
    """Return the writes of numbers to attributes that the next call reads; these have their earlier values again."""
    found = (item for item in writes.changing if item.owner.keys is None)
    values = ((item, item.attribute.value, item.value(lambda leaf: leaf)) for item in found)
    return tuple(item for item, *both in values if all(type(value) in NUMBERS for value in both))


@contextmanager
def counting(numbers: Sequence[AttributeWrite], found: list[AttributeWrite]) -> Iterator[None]:
    """Let objects stand for these numbers, and find the writes that change them as the block does.

    Raises:
        NumberNeededError: the block stores something else in their place.
    """
    before = [item.attribute.value for item in numbers]
    found.clear()
    for item, value in zip(numbers, before, strict=True):
        item.write(CountedNumber(Variable(item.attribute), type(value)))
    try:
        yield
        for item in numbers:
            formula = Formula(formula_of(item.attribute.value))
            found.append(replace(item, leaves=(formula,), settles=True, change=item.where))
    finally:
        for item, value in zip(numbers, before, strict=True):
            item.write(value)
