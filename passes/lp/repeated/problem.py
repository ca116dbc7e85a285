"""A program in which a few layers stand for many equal ones: its size does not grow with depth.

    layers 0 1 | 2 ... 93 | 94 95   ->   0 1 | 93, which stands for 92 | 94 95

The layer that stands for others has their time and their bytes: its columns say how much of them is kept and run again,
on average.  Positions at which some of them have run and others have not are left out: nothing is said there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from ...ir.arrays import Floats
from ...schedule.schedule import Placement, Placements
from ...simulate.forecast import Forecast
from ..problem import PlanProblem, ProducerOp, StorageVar
from .layers import EqualLayers

NOWHERE = -1e18  # bytes at a position at which nothing is said


@dataclass(frozen=True, eq=False)
class FoldedProgram(PlanProblem):
    """The program of `full` in which the `layers` but the outer ones, `outer` at each end, are blocks of so many equal
    ones each; of a block the last layer is there."""

    full: PlanProblem
    layers: EqualLayers
    outer: int
    blocks: tuple[int, ...]

    @cached_property
    def stands(self) -> dict[int, int]:
        """The layers that stand for a block, and for how many: themselves and those before them."""
        return {self.outer + end - 1: size for end, size in zip(accumulate(self.blocks), self.blocks, strict=True)}

    def window(self, maker: int) -> int:
        """The layer that stands for that of a maker of `full`; of what is in no block, its own."""
        layer = self.layers.of(maker)
        return next((last for last in self.stands if layer <= last), layer) if layer >= self.outer else layer

    @cached_property
    def chosen(self) -> tuple[int, ...]:
        """The makers of `full` that are there."""
        tied = range(self.outer, self.layers.count - self.outer)
        makers = range(len(self.full.producers))
        return tuple(o for o in makers if self.layers.of(o) not in tied or self.layers.of(o) in self.stands)

    @cached_property
    def index(self) -> dict[int, int]:
        """Where the makers of `full` are that are there."""
        return {o: k for k, o in enumerate(self.chosen)}

    def made(self, o: int) -> tuple[int, ...]:
        """The items of a maker of `full` that is there."""
        return self.producers[self.index[o]].storages

    @property
    def last(self) -> int:
        """The last layer that stands for others."""
        return self.layers.count - self.outer - 1

    @property
    def beside(self) -> tuple[int, int]:
        """The layers beside all blocks."""
        return self.outer - 1, self.last + 1

    @cached_property
    def producers(self) -> tuple[ProducerOp, ...]:
        found, count = [], 0
        for o in self.chosen:
            maker = self.full.producers[o]
            items = tuple(range(count, count + len(maker.storages)))
            count += len(items)
            found.append(replace(maker, us=maker.us * self.stands_for(o), storages=items))
        return tuple(found)

    @cached_property
    def storages(self) -> tuple[StorageVar, ...]:
        found = []
        for k, o in enumerate(self.chosen):
            for i in self.full.producers[o].storages:
                item, size = self.full.storages[i], self.stands_for(o)
                readers = dict.fromkeys(self.index[self.standing(w)] for w in item.readers)
                found.append(replace(item, nbytes=item.nbytes * size, producer=k, readers=tuple(readers)))
        return tuple(found)

    @cached_property
    def rng_draws(self) -> tuple[tuple[int, int, int], ...]:
        size = [self.stands_for(o) for o in self.chosen]
        ops, index = self.gaps.trace.op, self.gaps.index
        drawn = ((k, ops[maker.value]) for k, maker in enumerate(self.producers) if not maker.runs_once)
        return tuple((k, op.draws * size[k], index[op.name]) for k, op in drawn if op.draws)

    @cached_property
    def captured(self) -> Forecast:
        return self.full.captured

    @cached_property
    def storage_index(self) -> dict[str, int]:
        """The index of the item that stands for each, by its storage."""
        first = {o: maker.storages[0] for o, maker in zip(self.chosen, self.producers, strict=True)}
        return {
            self.full.storages[i].storage: first[self.standing(o)] + j
            for o, maker in enumerate(self.full.producers)
            for j, i in enumerate(maker.storages)
        }

    @cached_property
    def fixed(self) -> Floats:
        """That of `full`, where what stands for several layers says how they are."""
        base = self.full.fixed.copy()
        for layers in self._silent:
            items = [self.full.storages[i] for layer in layers for i in self._items(layer)]
            uses = [item.first_backward for item in items if item.first_backward < self.size]
            base[min(item.last_forward for item in items) + 1 : max(item.last_forward for item in items) + 1] = NOWHERE
            base[min(uses, default=self.size) : max(uses, default=self.size)] = NOWHERE
        return base

    @property
    def _silent(self) -> Iterator[range]:
        """Layers that have to be all at the same: forward has done with them and backward not begun, or has done as
        well.  Where one stands for all, those beside it are, too: rows between them are summed."""
        if len(self.blocks) == 1:
            first, last = self.beside
            yield range(first, last + 1)
        else:
            yield from (range(last - size + 1, last + 1) for last, size in self.stands.items() if size > 1)

    def _items(self, layer: int) -> Iterator[int]:
        return (i for o in self.layers.makers(layer) for i in self.full.producers[o].storages)

    @cached_property
    def wanted(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Any may run again anywhere in backward: what one layer wants early, others may want late."""
        return (self.boundary,) * len(self.storages), (self.boundary,) * len(self.producers)

    @cached_property
    def last_reruns(self) -> tuple[int, ...]:
        return (self.size,) * len(self.producers)

    def stands_for(self, o: int) -> int:
        return self.stands.get(self.layers.of(o), 1)

    def standing(self, o: int) -> int:
        """The maker that stands for one of `full`."""
        return self.layers.moved(o, self.window(o))

    def unfolded(self, fates: Placements) -> dict[str, Placement]:
        """What becomes of every storage of `full`, where those of `fates` stand for all."""
        return {storage: fates[self.storages[i].storage] for storage, i in self.storage_index.items()}
