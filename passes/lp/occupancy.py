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
from .memory_rows import reload_deadline
from .model import PlanModel
from .problem import Ints, StorageVar
from .rows import MIB
from .state_vars import StateVar

NEGLIGIBLE = 1e-9


@dataclass(frozen=True, eq=False)
class Occupancy:
    """A point, and what it comes to."""

    model: PlanModel
    values: Floats

    @cached_property
    def kept_mib(self) -> Floats:
        """MiB at every position, without what is made again and waits for its use."""
        program = self.model.problem
        until = np.where(program.first_backward < program.size, program.first_backward, program.boundary)
        kept = program.nbytes * self.keep / MIB
        return (
            self._gaps(program.last_forward + 1, until, kept) + self._states() + program.fixed / MIB + self.copies_mib
        )

    @property
    def any_plan_mib(self) -> Floats:
        """MiB that any plan has at every position, if backward keeps nothing but what it uses."""
        return self.model.problem.in_use / MIB + self.copies_mib

    def with_reruns(self, positions: Ints) -> Floats:
        """MiB at some backward positions, with what is made again and waits for its use."""
        ran = self._ran(positions)
        extra = np.zeros(len(positions))
        for i, item in enumerate(self.model.problem.storages):
            there = self._direct if item.first_backward < self.model.problem.size else self._indirect
            extra += item.nbytes / MIB * there(i, item, ran, positions)
        return self.kept_mib[positions] + extra

    @cached_property
    def keep(self) -> Floats:
        return self.values[self.model.keep]

    @cached_property
    def recompute(self) -> Floats:
        return self.values[self.model.recompute]

    @cached_property
    def offload(self) -> Floats:
        """How much of each item is away, cast for its way or not."""
        found = np.zeros(len(self.keep))
        for i in self.model.offload:
            found[i] = sum(self.values[column] for column in self.model.copied_mib(i))
        return found

    @cached_property
    def offload_mib(self) -> Floats:
        """MiB of each item that are away."""
        found = np.zeros(len(self.keep))
        for i in self.model.offload:
            found[i] = sum(self.values[column] * nbytes for column, nbytes in self.model.copied_mib(i).items())
        return found

    def _gaps(self, first: Ints, last: Ints, nbytes: Floats) -> Floats:
        """The sum at every position of the items that are there, with so many MiB, from `first` to before `last`."""
        change = np.zeros(self.model.problem.size + 1)
        np.add.at(change, first, nbytes)
        np.add.at(change, np.maximum(first, last), -nbytes)
        return np.cumsum(change)[:-1]

    def _states(self) -> Floats:
        """The generator's states that wait in forward."""
        change = np.zeros(self.model.problem.size + 1)
        for o, draws, first in self.model.problem.rng_draws:
            change[first] += draws / MIB * self.recompute[o]
            change[self.model.problem.boundary] -= draws / MIB * self.recompute[o]
        states: Floats = np.cumsum(change)[:-1]
        return states

    @cached_property
    def copies_mib(self) -> Floats:
        """What has not left yet, what has come back early, and staging."""
        program, links = self.model.problem, self.model.links
        if not links:
            return np.zeros(program.size)
        boundary = program.boundary
        end = np.full(len(self.offload), program.size)
        moving = self._gaps(program.last_forward + 1, end, self.offload_mib)
        moving[:boundary] -= self._carried(links.out)[:boundary]
        begin = np.array([reload_deadline(self.model, i) for i in range(len(self.offload))], dtype=np.int64)
        used = self._gaps(begin, end, self.offload_mib) + self._fetched()
        moving[boundary:] = np.maximum(self._carried(links.back, 1) - used, 0.0)[boundary:]
        moving[:boundary] += np.maximum(self._carried(links.forward_back, 1) - self._fetched(), 0.0)[:boundary]
        moving += self._resting(links)
        return moving + program.machine.link.staging / MIB * float(self.values[self.model.staging])

    def _carried(self, curve: Curve, before: int = 0) -> Floats:
        """A curve at every position: at the end of its stage, or so many stages before; 0 in the first of them."""
        if not curve.carried:
            return np.zeros(self.model.problem.size)
        j = np.searchsorted(curve.begins, np.arange(self.model.problem.size), side="right") - 1 - before
        return np.where(j >= 0, self.values[[*curve.carried]][np.maximum(j, 0)], 0.0)

    def _fetched(self) -> Floats:
        """What of the state has been fetched by every position at the latest."""
        change = np.zeros(self.model.problem.size)
        for resident, lives, stays in self._far():
            for k, (first, _) in enumerate(resident.uses if not resident.is_gradient else ()):
                change[first] += resident.nbytes / MIB * (lives - stays.get(k, 0.0))
        return np.cumsum(change)

    def _resting(self, links: LinkRows) -> Floats:
        """What far homes take away, and what an update takes for them."""
        program, far = self.model.problem, self.model.state
        change, done = np.zeros(program.size + 1), np.zeros(program.size + 1)
        for resident, lives, stays in self._far():
            for rest in resident.gaps(program.size):
                nbytes = resident.nbytes / MIB * (lives - stays.get(rest.next_use, 0.0))
                if resident.is_gradient:
                    done[rest.first] += nbytes
                else:
                    change[rest.first] -= nbytes
                    change[rest.last] += nbytes
        resting: Floats = np.cumsum(change)[:-1] - np.minimum(np.cumsum(done)[:-1], self._carried(links.backward_out))
        for position, window in far.windowed.items():
            workspace = program.gaps.trace.ops[position].workspace
            resting[position] += (program.machine.streaming.window - workspace) / MIB * self.values[window]
        for before, after in pairwise([*far.staged, program.size]):
            resting[before + 1 : after] += (
                program.machine.streaming.update_staging / MIB * self.values[far.staged[before]]
            )
        return resting

    def _far(self) -> Iterator[tuple[StateVar, float, dict[int | None, float]]]:
        """The residents of which a share lives far, that share, and how much of it stays before each visit."""
        far = self.model.state
        for h, resident in enumerate(self.model.problem.states):
            if (lives := float(self.values[far.offload[h]])) > NEGLIGIBLE:
                visits = range(1, len(resident.uses))
                yield resident, lives, {k: float(self.values[far.stay[h, k]]) for k in visits}

    def _ran(self, positions: Ints) -> Floats:
        """For each maker and position how much of it has run again."""
        program = self.model.problem
        saved = self.keep + self.offload
        ran = np.zeros((len(program.producers), len(positions)))
        for o in reversed(range(len(program.producers))):
            if self.recompute[o] < NEGLIGIBLE:
                continue
            made, least = program.producers[o].storages, np.zeros(len(positions))
            for i in made:
                item = program.storages[i]
                if item.first_backward < program.size:
                    wanted = self.recompute[o] if len(made) == 1 else 1.0 - saved[i]
                    least = np.maximum(least, np.where(item.first_backward <= positions, wanted, 0.0))
                for w in item.readers:
                    if self.recompute[w] >= NEGLIGIBLE:
                        least = np.maximum(least, ran[w] - saved[i])
            ran[o] = np.minimum(least, self.recompute[o])
        return ran

    def _direct(self, i: int, item: StorageVar, ran: Floats, positions: Ints) -> Floats:
        if self.model.problem.producers[item.producer].makes_one:
            there = self.keep[i] + ran[item.producer]
        else:
            there = np.maximum(self.keep[i], ran[item.producer] - self.offload[i])
        for w in item.readers:
            there = np.maximum(there, ran[w])
        inside = (item.last_forward < positions) & (item.first_backward > positions)
        return np.where(inside, there - self.keep[i], 0.0)

    def _indirect(self, i: int, item: StorageVar, ran: Floats, positions: Ints) -> Floats:
        there, made = np.zeros(len(positions)), ran[item.producer]
        alone = self.model.problem.producers[item.producer].makes_one
        most = self.keep[i] + made if alone else np.maximum(self.keep[i], made)
        for w in item.readers:
            there = np.maximum(there, np.minimum(most, self.recompute[w]) - ran[w])
        return there
