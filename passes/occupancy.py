"""How many bytes a point of the linear program puts at every position, rows or no rows.

K = (1, 0, 0.5, ...)   ->   plain: [18.2, 18.9, ...] MiB of what is kept;  worked(positions): with re-runs
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .memory import back_by
from .model import MIB, Model
from .program import Floats, Ints, Item

NOTHING = 1e-9


@dataclass(frozen=True, eq=False)
class Occupancy:
    """A point, and what it comes to."""

    model: Model
    values: Floats

    @cached_property
    def plain(self) -> Floats:
        """MiB at every position, without what is made again and waits for its use."""
        program = self.model.program
        until = np.where(program.use < program.size, program.use, program.boundary)
        kept = program.nbytes * self.kept / MIB
        return self._gaps(program.left + 1, until, kept) + program.base / MIB + self._moving()

    def worked(self, positions: Ints) -> Floats:
        """MiB at some backward positions, with what is made again and waits for its use."""
        ran = self._ran(positions)
        extra = np.zeros(len(positions))
        for i, item in enumerate(self.model.program.items):
            there = self._direct if item.use < self.model.program.size else self._indirect
            extra += item.nbytes / MIB * there(i, item, ran, positions)
        return self.plain[positions] + extra

    @cached_property
    def kept(self) -> Floats:
        return self.values[self.model.kept]

    @cached_property
    def again(self) -> Floats:
        return self.values[self.model.again]

    @cached_property
    def away(self) -> Floats:
        """How much of each item is away, cast for its way or not."""
        found = np.zeros(len(self.kept))
        for i in self.model.away:
            found[i] = sum(self.values[column] for column in self.model.sent(i))
        return found

    @cached_property
    def sent(self) -> Floats:
        """MiB of each item that are away."""
        found = np.zeros(len(self.kept))
        for i in self.model.away:
            found[i] = sum(self.values[column] * nbytes for column, nbytes in self.model.sent(i).items())
        return found

    def _gaps(self, first: Ints, last: Ints, nbytes: Floats) -> Floats:
        """The sum at every position of the items that are there, with so many MiB, from `first` to before `last`."""
        change = np.zeros(self.model.program.size + 1)
        np.add.at(change, first, nbytes)
        np.add.at(change, np.maximum(first, last), -nbytes)
        return np.cumsum(change)[:-1]

    def _moving(self) -> Floats:
        """What has not left yet, what has come back early, and staging."""
        program, links = self.model.program, self.model.links
        if not links:
            return np.zeros(program.size)
        positions = np.arange(program.size)
        end = np.full(len(self.away), program.size)
        moving = self._gaps(program.left + 1, end, self.sent)
        left = self.values[[*links.out.carried]]
        out = np.searchsorted(links.out.begins, positions[: program.boundary], side="right") - 1
        moving[: program.boundary] -= left[np.maximum(out, 0)]
        back = np.searchsorted(links.back.begins, positions[program.boundary :], side="right") - 1
        come = np.concatenate([[0.0], self.values[[*links.back.carried]]])[np.maximum(back, 0)]
        begin = np.array([back_by(self.model, i) for i in range(len(self.away))], dtype=np.int64)
        used = self._gaps(begin, end, self.sent)[program.boundary :]
        moving[program.boundary :] = np.where(back > 0, np.maximum(come - used, 0.0), 0.0)
        return moving + program.machine.staging / MIB * float(self.values[self.model.staged])

    def _ran(self, positions: Ints) -> Floats:
        """For each maker and position how much of it has run again."""
        program = self.model.program
        saved = self.kept + self.away
        ran = np.zeros((len(program.makers), len(positions)))
        for o in reversed(range(len(program.makers))):
            if self.again[o] < NOTHING:
                continue
            made, least = program.makers[o].items, np.zeros(len(positions))
            for i in made:
                item = program.items[i]
                if item.use < program.size:
                    wanted = self.again[o] if len(made) == 1 else 1.0 - saved[i]
                    least = np.maximum(least, np.where(item.use <= positions, wanted, 0.0))
                for w in item.readers:
                    if self.again[w] >= NOTHING:
                        least = np.maximum(least, ran[w] - saved[i])
            ran[o] = np.minimum(least, self.again[o])
        return ran

    def _direct(self, i: int, item: Item, ran: Floats, positions: Ints) -> Floats:
        if self.model.program.makers[item.maker].alone:
            there = self.kept[i] + ran[item.maker]
        else:
            there = np.maximum(self.kept[i], ran[item.maker] - self.away[i])
        for w in item.readers:
            there = np.maximum(there, ran[w])
        inside = (item.left < positions) & (item.use > positions)
        return np.where(inside, there - self.kept[i], 0.0)

    def _indirect(self, i: int, item: Item, ran: Floats, positions: Ints) -> Floats:
        there, made = np.zeros(len(positions)), ran[item.maker]
        alone = self.model.program.makers[item.maker].alone
        most = self.kept[i] + made if alone else np.maximum(self.kept[i], made)
        for w in item.readers:
            there = np.maximum(there, np.minimum(most, self.again[w]) - ran[w])
        return there
