"""Time and memory of every stage that a step can be cut into, at once.

borders 0, 3, 7, 9        us[1, 2]: the time of the ops at places 3 to 6;  saved[1, 2]: what backward there reads

Arrays have an entry for each border, or for each pair of borders [i, j): the stage from one to the other.  A storage
counts in a stage once, however often it is read there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..ir.arrays import Floats, Ints
from ..ir.trace import Op
from .places import Places

RESIDENT = ("parameter", "buffer", "gradient", "state")  # inputs that stay on the device between steps


@dataclass(frozen=True, eq=False)
class IntervalCosts:
    """Costs of the stages between the borders of a trace.

    Attributes:
        places: of the trace that is cut.
    """

    places: Places

    @cached_property
    def borders(self) -> tuple[int, ...]:
        """Return the places at which a stage may begin or end."""
        return (0, *self.places.cuts, self.places.trace.boundary)

    @cached_property
    def us(self) -> Floats:
        """Return [i, j): the time of forward and backward of one micro-batch."""
        return self.forward_us + self.backward_us

    @cached_property
    def forward_us(self) -> Floats:
        """Return [i, j): the time of forward of one micro-batch."""
        return self._us(range(self.places.trace.boundary))

    @cached_property
    def backward_us(self) -> Floats:
        """Return [i, j): the time of backward of one micro-batch."""
        return self._us(range(self.places.trace.boundary, len(self.places.trace.ops)))

    def _us(self, ops: range) -> Floats:
        before = np.zeros(len(self.borders))
        for i in ops:
            op = self.places.trace.ops[i]
            before[self._cell[i] + 1] += 0.0 if op.name in self.places.sums else op.us
        before = np.cumsum(before)
        return before[None, :] - before[:, None]

    @cached_property
    def resident(self) -> Ints:
        """Return [i, j): the bytes of parameters, buffers, their gradients and states, and of what backward returns."""
        kept = ((s, cells) for s, cells in self._used.items() if self._maker(s).fn in RESIDENT)
        return self._within([*kept, *self._returned])

    @property
    def _returned(self) -> Iterator[tuple[str, list[int]]]:
        """Yield a storage of each gradient, with the borders behind which it, or its parts, are made.

        A stage that makes several parts returns their sum, so they count once; where another stage has a part between
        them they are more.
        """
        done: set[str] = set()
        for value in (value for kind, value in self.places.trace.outputs if kind != "output"):
            parts = self.places.trace.held_by(self.places.parts(value))
            made = [s for s in parts if not self._maker(s).is_input and s not in done]
            done.update(made)
            if value in self.places.sums and made:
                yield min(made, key=self.places.trace.nbytes.__getitem__), [self._made_at(s) for s in made]
            else:
                yield from ((s, [self._made_at(s)]) for s in made)

    def _made_at(self, storage: str) -> int:
        return int(self._cell[self.places.producer[storage]])

    @cached_property
    def saved(self) -> Ints:
        """Return [i, j): the bytes that an open forward holds for its backward, those received included."""
        boundary = self.places.trace.boundary
        kept = (
            (storage, [self._cell_of(place) for place in backward])
            for storage, (_, backward) in self.places.uses.items()
            if backward and self._is_moved(storage) and self.places.producer[storage] < boundary
        )
        return self._within(kept)

    @cached_property
    def crossing(self) -> Ints:
        """Return the bytes that cross each border: of values that are sent on, and of gradients that are sent back."""
        change = np.zeros(len(self.borders) + 1, np.int64)
        for storage, first, last in self._crossings():
            change[first] += self.places.trace.nbytes[storage]
            change[last] -= self.places.trace.nbytes[storage]
        return np.cumsum(change)[:-1]

    @cached_property
    def makers(self) -> tuple[Ints, Floats, Floats]:
        """Return the border behind which each saved storage is made, its bytes, and the time to make it again.

        The cheapest a byte comes first.  Storages of ops that run once are left out.
        """
        trace, rows = self.places.trace, []
        for storage, (_, backward) in self.places.uses.items():
            maker = self._maker(storage)
            if backward and self._is_moved(storage) and maker.phase == "forward" and not maker.once:
                rows.append((int(self._cell[self.places.producer[storage]]), trace.nbytes[storage], maker.us))
        rows.sort(key=lambda row: row[2] / max(row[1], 1))
        cells, nbytes, us = zip(*rows, strict=True) if rows else ((), (), ())
        return np.array(cells, np.int64), np.array(nbytes, np.float64), np.array(us, np.float64)

    def _crossings(self) -> Iterator[tuple[str, int, int]]:
        """Yield each storage that crosses borders, with the first border and the one behind the last."""
        for storage, (forward, backward) in self.places.uses.items():
            if not self._is_moved(storage) or storage in self._summed:
                continue
            made = int(self._cell[self.places.producer[storage]])
            cells = [made, *map(self._cell_of, (*forward, *backward))]
            yield storage, min(cells) + 1, max(cells) + 1

    @cached_property
    def _summed(self) -> frozenset[str]:
        """Return the gradients that are added up once a step."""
        trace = self.places.trace
        return frozenset(trace.held_by(read for name in self.places.sums for read in trace.op[name].reads))

    def _is_moved(self, storage: str) -> bool:
        """Return True for a storage that is sent if another stage reads it; each stage has the inputs that it reads."""
        return not self._maker(storage).is_input

    def _maker(self, storage: str) -> Op:
        return self.places.trace.ops[self.places.producer[storage]]

    def _within(self, storages: Iterable[tuple[str, Iterable[int]]]) -> Ints:
        """Return [i, j): the bytes of the storages that have at least one of their cells there."""
        size = len(self.borders)
        change = np.zeros((size + 1, size + 1), np.int64)
        for storage, cells in storages:
            nbytes, before = self.places.trace.nbytes[storage], -1
            for cell in sorted(set(cells)):  # counts in the stages that begin behind `before` and end behind `cell`
                change[before + 1, cell + 1] += nbytes
                change[cell + 1, cell + 1] -= nbytes
                before = cell
        return np.cumsum(np.cumsum(change, axis=0), axis=1)[:size, :size]

    @cached_property
    def _used(self) -> dict[str, list[int]]:
        """Map each storage to the cells of its readers."""
        return {s: [self._cell_of(p) for p in (*f, *b)] for s, (f, b) in self.places.uses.items()}

    @cached_property
    def _cell(self) -> Ints:
        """Return, for each op, the border at or before its place."""
        return np.searchsorted(np.array(self.borders[:-1]), self.places.place, side="right") - 1

    def _cell_of(self, place: int) -> int:
        return int(np.searchsorted(np.array(self.borders[:-1]), place, side="right")) - 1
