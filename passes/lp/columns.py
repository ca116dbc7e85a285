"""The columns of the linear program: a number between 0 and 1 for each thing that a plan decides.

    x = relu(y), 4 MB             ->   keep[x], offload[x], recompute[relu]
    w, 2 MB, a parameter          ->   state.offload[w], and state.stay[w, 1] between its first use and its second

A storage and a producer are named by their indices in the problem, a state by its index among the states.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..analysis.host_update import StateGroup, state_groups
from .linear_program import INFINITY, LinearProgram
from .problem import PlanProblem

MIB = float(1 << 20)
TIE = 1e-4  # microseconds per MiB: of two plans that take the same time, prefer the one that copies less
Terms = dict[int, float]  # column -> coefficient


@dataclass(frozen=True, eq=False)
class StateColumns:
    """The columns of offloaded state: parameters, gradients and optimizer states.

    Attributes:
        offload: of each state.
        stay: of each state and use: 1 if the state stays on the device from the use before.
        windowed: of each update, by its position: 1 if it runs in windows.
        extra_us: of each update: how much longer than its own time it takes.
        host_update: of each optimizer state that the host may update, by its value: 1 if the host does; and the
            microseconds in which the links copy its parameter and gradient.
        staged: of each update: 1 if its windows, or those of an update before it, stay on the device behind it.
    """

    offload: tuple[int, ...]
    stay: dict[tuple[int, int], int]
    windowed: dict[int, int]
    extra_us: dict[int, int]
    host_update: dict[str, tuple[int, int]]
    staged: dict[int, int]

    @classmethod
    def add(cls, lp: LinearProgram, problem: PlanProblem) -> StateColumns:
        """Add the columns to a linear program."""
        overhead_us = [problem.machine.link.overhead_us(state.nbytes) for state in problem.states]
        costs = zip(overhead_us, problem.states, strict=True)
        offload = tuple(lp.add_column(us * len(state.uses) + TIE * state.nbytes / MIB) for us, state in costs)
        stay = {
            (r, gap.next_use): lp.add_column(-overhead_us[r])
            for r, state in enumerate(problem.states)
            for gap in state.gaps(problem.size)
            if gap.next_use is not None
        }
        updates = problem.update_positions if offload else ()
        extra_us = {position: lp.add_column(1.0, most=INFINITY) for position in updates}
        windowed = {position: lp.add_column() for position in updates}
        stages = bool(problem.machine.streaming.update_staging)
        staged = {position: lp.add_column() for position in updates if stages}
        host_update = {
            value: (lp.add_column(), lp.add_column(most=INFINITY)) for value in _host_updatable(problem) if offload
        }
        return cls(offload, stay, windowed, extra_us, host_update, staged)


@dataclass(frozen=True, eq=False)
class Columns:
    """The columns of storages, producers and states."""

    problem: PlanProblem
    keep: list[int]
    recompute: list[int]
    offload: dict[int, int]
    cast_offload: dict[int, int]
    state: StateColumns
    staging: int | None  # 1 if the plan copies anything; None if it can't

    @classmethod
    def add(cls, lp: LinearProgram, problem: PlanProblem) -> Columns:
        """Add the columns to a linear program; their costs are its objective."""
        link, cast = problem.machine.link, problem.machine.cast
        keep = [lp.add_column(least=float(_must_keep(problem, i))) for i in range(len(problem.storages))]
        recompute = [lp.add_column(each.us, most=float(not each.runs_once)) for each in problem.producers]
        offload = {
            i: lp.add_column(2 * link.overhead_us(each.nbytes) + TIE * each.nbytes / MIB)
            for i, each in enumerate(problem.storages)
            if each.can_offload
        }
        cast_offload = {
            i: lp.add_column(
                cast.us(each.nbytes) + 2 * link.overhead_us(each.wire_nbytes) + TIE * each.wire_nbytes / MIB
            )
            for i, each in enumerate(problem.storages)
            if each.wire_nbytes
        }
        state = StateColumns.add(lp, problem)
        staging = lp.add_column() if offload or state.offload else None
        return cls(problem, keep, recompute, offload, cast_offload, state, staging)

    @property
    def integers(self) -> list[int]:
        """The columns that a plan makes 0 or 1; the others follow from these."""
        return [*self.keep, *self.offload.values(), *self.cast_offload.values(), *self.state.offload]

    def saved(self, i: int) -> Terms:
        """Return the share of a storage that is kept or offloaded."""
        return {self.keep[i]: 1.0, **dict.fromkeys(self.copied_mib(i), 1.0)}

    def copied_mib(self, i: int) -> Terms:
        """Return the MiB of a storage that are copied each way; no terms if it can't be offloaded."""
        storage = self.problem.storages[i]
        ways = (self.offload, storage.nbytes), (self.cast_offload, storage.wire_nbytes)
        return {columns[i]: nbytes / MIB for columns, nbytes in ways if i in columns}

    @property
    def tie_us(self) -> float:
        """The most that ties add to the objective."""
        storages = sum(self.problem.storages[i].nbytes for i in self.offload)
        return TIE * (storages + sum(state.nbytes for state in self.problem.states)) / MIB


def update_groups(problem: PlanProblem, position: int) -> tuple[StateGroup, ...]:
    """Return the optimizer states that an update reads, each with its parameters and gradients."""
    trace = problem.gaps.trace
    return tuple(state_groups(trace, trace.ops[position]))


def _must_keep(problem: PlanProblem, i: int) -> bool:
    storage = problem.storages[i]
    is_read = storage.first_backward < problem.size
    return problem.producers[storage.producer].runs_once and not storage.can_offload and is_read


def _host_updatable(problem: PlanProblem) -> list[str]:
    """List the optimizer states that the host may update, if it updates any."""
    if not problem.machine.streaming.host_update_rate:
        return []
    values = {state.value for state in problem.states}
    groups = (group for position in problem.update_positions for group in update_groups(problem, position))
    return list(dict.fromkeys(group.states.name for group in groups if group.states.name in values))
