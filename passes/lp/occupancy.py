"""How many bytes a point of the linear program puts at every position, rows or no rows.

K = (1, 0, 0.5, ...)   ->   plain: [18.2, 18.9, ...] MiB of what is kept;  worked(positions): with re-runs
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from ..ir.arrays import Floats
from .bandwidth_rows import Curve, LinkRows
from .memory_rows import back_by
from .model import PlanModel
from .problem import Ints, StorageVar
from .residents import Resident
from .rows import MIB

NOTHING = 1e-9


@dataclass(frozen=True, eq=False)
class Occupancy:
    """A point, and what it comes to."""

    model: PlanModel
    values: Floats

    @cached_property
    def plain(self) -> Floats:
        """MiB at every position, without what is made again and waits for its use."""
        program = self.model.program
        until = np.where(program.use < program.size, program.use, program.boundary)
        kept = program.nbytes * self.kept / MIB
        return self._gaps(program.left + 1, until, kept) + self._states() + program.base / MIB + self.moving

    @property
    def anyhow(self) -> Floats:
        """MiB that any plan has at every position, if backward keeps nothing but what it uses."""
        return self.model.program.used / MIB + self.moving

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

    def _states(self) -> Floats:
        """The generator's states that wait in forward."""
        change = np.zeros(self.model.program.size + 1)
        for o, draws, first in self.model.program.draws:
            change[first] += draws / MIB * self.again[o]
            change[self.model.program.boundary] -= draws / MIB * self.again[o]
        states: Floats = np.cumsum(change)[:-1]
        return states

    @cached_property
    def moving(self) -> Floats:
        """What has not left yet, what has come back early, and staging."""
        program, links = self.model.program, self.model.links
        if not links:
            return np.zeros(program.size)
        boundary = program.boundary
        end = np.full(len(self.away), program.size)
        moving = self._gaps(program.left + 1, end, self.sent)
        moving[:boundary] -= self._carried(links.out)[:boundary]
        begin = np.array([back_by(self.model, i) for i in range(len(self.away))], dtype=np.int64)
        used = self._gaps(begin, end, self.sent) + self._fetched()
        moving[boundary:] = np.maximum(self._carried(links.back, 1) - used, 0.0)[boundary:]
        moving[:boundary] += np.maximum(self._carried(links.fetch, 1) - self._fetched(), 0.0)[:boundary]
        moving += self._resting(links)
        return moving + program.machine.link.staging / MIB * float(self.values[self.model.staged])

    def _carried(self, curve: Curve, before: int = 0) -> Floats:
        """A curve at every position: at the end of its stage, or so many stages before; 0 in the first of them."""
        if not curve.carried:
            return np.zeros(self.model.program.size)
        j = np.searchsorted(curve.begins, np.arange(self.model.program.size), side="right") - 1 - before
        return np.where(j >= 0, self.values[[*curve.carried]][np.maximum(j, 0)], 0.0)

    def _fetched(self) -> Floats:
        """What of the state has been fetched by every position at the latest."""
        change = np.zeros(self.model.program.size)
        for resident, lives, stays in self._far():
            for k, (first, _) in enumerate(resident.visits if not resident.made else ()):
                change[first] += resident.nbytes / MIB * (lives - stays.get(k, 0.0))
        return np.cumsum(change)

    def _resting(self, links: LinkRows) -> Floats:
        """What far homes take away, and what an update takes for them."""
        program, far = self.model.program, self.model.far
        change, done = np.zeros(program.size + 1), np.zeros(program.size + 1)
        for resident, lives, stays in self._far():
            for rest in resident.rests(program.size):
                nbytes = resident.nbytes / MIB * (lives - stays.get(rest.visit, 0.0))
                if resident.made:
                    done[rest.first] += nbytes
                else:
                    change[rest.first] -= nbytes
                    change[rest.last] += nbytes
        resting: Floats = np.cumsum(change)[:-1] - np.minimum(np.cumsum(done)[:-1], self._carried(links.home))
        for position, window in far.windows.items():
            workspace = program.gaps.trace.ops[position].workspace
            resting[position] += (program.machine.streaming.window - workspace) / MIB * self.values[window]
        for before, after in pairwise([*far.ahead, program.size]):
            resting[before + 1 : after] += (
                program.machine.streaming.update_staging / MIB * self.values[far.ahead[before]]
            )
        return resting

    def _far(self) -> Iterator[tuple[Resident, float, dict[int | None, float]]]:
        """The residents of which a share lives far, that share, and how much of it stays before each visit."""
        far = self.model.far
        for h, resident in enumerate(self.model.program.residents):
            if (lives := float(self.values[far.lives[h]])) > NOTHING:
                visits = range(1, len(resident.visits))
                yield resident, lives, {k: float(self.values[far.stays[h, k]]) for k in visits}

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

    def _direct(self, i: int, item: StorageVar, ran: Floats, positions: Ints) -> Floats:
        if self.model.program.makers[item.maker].alone:
            there = self.kept[i] + ran[item.maker]
        else:
            there = np.maximum(self.kept[i], ran[item.maker] - self.away[i])
        for w in item.readers:
            there = np.maximum(there, ran[w])
        inside = (item.left < positions) & (item.use > positions)
        return np.where(inside, there - self.kept[i], 0.0)

    def _indirect(self, i: int, item: StorageVar, ran: Floats, positions: Ints) -> Floats:
        there, made = np.zeros(len(positions)), ran[item.maker]
        alone = self.model.program.makers[item.maker].alone
        most = self.kept[i] + made if alone else np.maximum(self.kept[i], made)
        for w in item.readers:
            there = np.maximum(there, np.minimum(most, self.again[w]) - ran[w])
        return there
