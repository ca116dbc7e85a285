"""Rows of the linear program for memory: the bytes at a position fit the budget.

    position 812 (backward)   ->   fixed + 4.0 present[relu, 812] + 8.0 keep[mm] + ... <= budget

A position gets its rows when a solution is found to break them: a few dozen of thousands are enough.
"""

from __future__ import annotations

import numpy as np

from ..ir.arrays import Floats
from .bandwidth_rows import LinkRows
from .columns import MIB, Columns, Terms
from .linear_program import INFINITY, LinearProgram
from .problem import PlanProblem
from .state_rows import device_mib, gradient_mib, reloaded_mib

# Ops.  In longer steps the rows of a position leave out the recomputations that have run by then, if they run at all.
# The least objective is no lower without them, which saves up to two thirds of the time.  In shorter steps that saves
# little, and solutions of the program that has them happen to be rounded better.
LONG = 5_500


class MemoryRows:
    """Adds the rows of positions to a linear program, and knows which have some."""

    def __init__(self, lp: LinearProgram, columns: Columns, links: LinkRows | None, budget: int) -> None:
        self.lp, self.columns, self.links, self.budget = lp, columns, links, budget
        self.problem = problem = columns.problem
        self.last_reruns = problem.last_reruns if problem.size > LONG else (problem.size,) * len(problem.producers)
        self.positions: set[int] = set()  # that have rows of the plans that recompute once
        self.any_plan_positions: set[int] = set()  # in backward, that have rows of all plans

    def add(self, position: int) -> None:
        """Add the rows of a position, unless it has them."""
        if position not in self.positions:
            self.positions.add(position)
            (self._add_forward if position < self.problem.boundary else self._add_backward)(position)

    def add_any_plan(self, position: int) -> None:
        """Add the rows of a position that hold for any plan, unless it has them."""
        if position < self.problem.boundary:
            self.add(position)
        elif position not in self.any_plan_positions:
            self.any_plan_positions.add(position)
            terms = Terms()
            self._add_copies(position, terms, Terms())
            self._write(position, terms, self.problem.in_use)

    def _add_forward(self, position: int) -> None:
        """Count storages after their last use in forward, as far as they are kept or have not left yet."""
        terms = Terms()
        for i in map(int, np.flatnonzero(self.problem.last_forward < position)):
            _add(terms, self.columns.keep[i], self.problem.storages[i].nbytes / MIB)
            for column, mib in self.columns.copied_mib(i).items():
                _add(terms, column, mib)
        if self.links and (left := self.links.offloaded_by(position)) is not None:
            _add(terms, left, -1.0)
        self._add_rng_states(position, terms, {})
        self._add_copies(position, terms, Terms())
        self._write(position, terms, self.problem.fixed)

    def _add_backward(self, position: int) -> None:
        """Count storages between forward and their first use in backward, kept, recomputed or reloaded."""
        problem, terms, reloaded = self.problem, Terms(), Terms()
        reran = self._reran(position)
        for i in map(int, np.flatnonzero((problem.last_forward < position) & (problem.first_backward > position))):
            storage = problem.storages[i]
            is_read = storage.first_backward < problem.size
            present = self._present(i, reran, reloaded) if is_read else self._present_for_reruns(i, reran, position)
            for column, share in present.items():
                _add(terms, column, share * storage.nbytes / MIB)
        self._add_rng_states(position, terms, reran)
        self._add_copies(position, terms, reloaded)
        self._write(position, terms, problem.fixed)

    def _add_rng_states(self, position: int, terms: Terms, reran: dict[int, int]) -> None:
        """Count the generator states of ops that draw random numbers and are recomputed later."""
        for o, nbytes, first in self.problem.rng_draws:
            if first <= position:
                _add(terms, self.columns.recompute[o], nbytes / MIB)
                if o in reran:
                    _add(terms, reran[o], -nbytes / MIB)

    def _add_copies(self, position: int, terms: Terms, reloaded: Terms) -> None:
        """Count storages and state that are back early, and gradients until they have left."""
        if self.links and (back := self.links.reloaded_before(position)) is not None:
            _add(terms, self._early(position, back, reloaded), 1.0)
        if (left := self._gradients_left(position)) is not None:
            _add(terms, left, -1.0)

    def _early(self, position: int, back: int, reloaded: Terms) -> int:
        """Add a column for the MiB that are back before their use; in use, they are fixed or part of `reloaded`."""
        column = self.lp.add_column(most=INFINITY)
        least = {column: 1.0, back: -1.0, **reloaded}
        for i in self.columns.offload:
            if first_need(self.problem, i) <= position:
                least |= self.columns.copied_mib(i)
        least |= reloaded_mib(self.columns, lambda first: first <= position)
        self.lp.add_row(0.0, INFINITY, least)
        return column

    def _gradients_left(self, position: int) -> int | None:
        """Add a column for the MiB of gradients that have left; None if no gradient is complete."""
        complete = gradient_mib(self.columns, position)
        if not complete or not self.links:
            return None
        column = self.lp.add_column(most=INFINITY)
        self.lp.add_row(0.0, INFINITY, {column: -1.0, **complete})
        if (carried := self.links.backward_out.by(position)) is not None:
            self.lp.add_row(0.0, INFINITY, {column: -1.0, carried: 1.0})
        return column

    def _reran(self, position: int) -> dict[int, int]:
        """Return a column for each producer that may have been recomputed by a position: how much of it has."""
        problem, lp, columns = self.problem, self.lp, self.columns
        recomputable = (o for o, each in enumerate(problem.producers) if not each.runs_once)
        reran = {o: columns.recompute[o] for o in recomputable if problem.first_reruns[o] <= position}
        for o in reversed([o for o in reran if self.last_reruns[o] > position]):
            produced = problem.producers[o].storages
            used = [i for i in produced if problem.storages[i].first_backward <= position]
            if used and len(produced) == 1:
                continue
            reran[o] = column = lp.add_column()
            lp.add_row(0.0, INFINITY, {columns.recompute[o]: 1.0, column: -1.0})
            # `recompute` does not say that it has run by now: of its storages, those used so far may be saved.
            for i in used:
                lp.add_row(1.0, INFINITY, {column: 1.0, **columns.saved(i)})
            for i in produced:
                for w in problem.storages[i].readers:
                    if w in reran:
                        lp.add_row(0.0, INFINITY, {column: 1.0, **columns.saved(i), reran[w]: -1.0})
        return reran

    def _present(self, i: int, reran: dict[int, int], reloaded: Terms) -> Terms:
        """Return how much of a storage is present that backward has yet to read: kept, recomputed, or reloaded.

        `reloaded` takes the bytes of what was reloaded for a recomputation.
        """
        storage, keep, add_row = self.problem.storages[i], self.columns.keep[i], self.lp.add_row
        recomputed = reran.get(storage.producer)
        read = [reran[w] for w in storage.readers if w in reran]
        makes_one = self.problem.producers[storage.producer].makes_one
        if recomputed is None and not read:
            return {keep: 1.0}
        if recomputed is not None and makes_one and i not in self.columns.offload:
            return {keep: 1.0, recomputed: 1.0}  # recomputed readers need one of the two
        column, copied = self.lp.add_column(), dict.fromkeys(self.columns.copied_mib(i), 1.0)
        for least in read:
            add_row(0.0, INFINITY, {column: 1.0, least: -1.0})
        if recomputed is None or not makes_one:
            add_row(0.0, INFINITY, {column: 1.0, keep: -1.0})
        if recomputed is not None and makes_one:
            add_row(0.0, INFINITY, {column: 1.0, recomputed: -1.0, keep: -1.0})
        elif recomputed is not None:
            add_row(0.0, INFINITY, {column: 1.0, recomputed: -1.0, **copied})
        if read and copied:
            back = self.lp.add_column()
            add_row(0.0, INFINITY, {column: 1.0, back: -1.0})
            add_row(0.0, INFINITY, {**copied, back: -1.0})
            reloaded[back] = storage.nbytes / MIB
        return {column: 1.0}

    def _present_for_reruns(self, i: int, reran: dict[int, int], position: int) -> Terms:
        """Return how much of a storage is present that only recomputations read: until the last of them."""
        storage, keep, add_row = self.problem.storages[i], self.columns.keep[i], self.lp.add_row
        if all(w not in reran for w in storage.readers):
            return {keep: 1.0} if storage.readers else {}
        if all(self.last_reruns[w] <= position for w in storage.readers):
            return {}
        makes_one = self.problem.producers[storage.producer].makes_one
        recomputed = reran.get(storage.producer) if makes_one else None
        column = self.lp.add_column()
        if len(storage.readers) == 1:
            saved = {keep: -1.0} if recomputed is None else {keep: -1.0, recomputed: -1.0}
            add_row(0.0, INFINITY, {column: 1.0, **saved, reran[storage.readers[0]]: 1.0})
            return {column: 1.0}
        recompute, copied = self.columns.recompute[storage.producer], dict.fromkeys(self.columns.copied_mib(i), 1.0)
        later = {recompute: 1.0} if recomputed is None else {recompute: 1.0, recomputed: -1.0}
        later = {} if recomputed == recompute else later
        for w in storage.readers:
            reader, reader_ran = self.columns.recompute[w], reran.get(w)
            if reader_ran != reader:
                reads = {reader: -1.0} if reader_ran is None else {reader: -1.0, reader_ran: 1.0}
                if makes_one:
                    add_row(0.0, INFINITY, {column: 1.0, **reads, **later, **copied})
                else:
                    add_row(-1.0, INFINITY, {column: 1.0, keep: -1.0, **reads})
        return {column: 1.0}

    def _write(self, position: int, terms: Terms, fixed: Floats) -> None:
        """Write the row of a position with `fixed` bytes that no column decides."""
        row = Terms()
        if self.columns.staging is not None:
            row[self.columns.staging] = self.problem.machine.link.staging / MIB
        for column, mib in terms.items():
            _add(row, column, mib)
        for column, mib in device_mib(self.columns, position).items():
            _add(row, column, mib)
        self.lp.add_row(-INFINITY, float(self.budget - fixed[position]) / MIB, row)


def first_need(problem: PlanProblem, i: int) -> int:
    """Return the position from which an offloaded storage no longer counts as reloaded early.

    It is in use then, or, if only recomputations read it, may be gone.
    """
    storage = problem.storages[i]
    return storage.first_backward if storage.first_backward < problem.size else problem.first_needs[i]


def _add(terms: Terms, column: int, value: float) -> None:
    terms[column] = terms.get(column, 0.0) + value
