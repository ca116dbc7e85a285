"""A linear program that grows, solved by HiGHS, as it is or with some columns integer.

    x = lp.add_column(cost=2.0)
    lp.add_row(1.0, INFINITY, {x: 1.0})
    lp.solve()   ->   Solution(us=2.0, values=[1.0], reduced_costs=[0.0])

Work is limited in simplex steps and nodes, so the same program always has the same answer; in seconds only if a caller
gives a time at which to stop.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from ..ir.arrays import Floats
from .linear_program import INFINITY, LinearProgram

try:
    import highspy
except ImportError:  # then the greedy passes plan alone
    highspy = cast(Any, None)

MISSING, INSTALL = "highspy is not installed", "pip install highspy"
OPTIONS = {
    "output_flag": False,
    "threads": 1,
    "random_seed": 1,
    "mip_rel_gap": 0.0,  # relative to the time added; `SearchLimits` counts in time of the step
    "mip_improving_solution_save": True,
    "mip_feasibility_tolerance": 1e-9,  # with a larger one, HiGHS 1.15 has called solutions optimal that were not
}
STEPS_PER_LOOK = 256, 16  # simplex steps between two looks of a search at its limits: at the root node, below it
MOST_STEPS = (1 << 31) - 1  # that HiGHS can be told
COLUMNS_PER_STEP = 16  # columns that are prepared for a search in the time of a simplex step


@dataclass(frozen=True, eq=False)
class Solution:
    """A solution: its objective, a bound below all others, the value of each column, and its reduced cost.

    Attributes:
        duals: the dual value of each row; empty where columns are integers.
    """

    us: float
    bound_us: float
    values: Floats
    reduced_costs: Floats
    duals: Floats = field(default_factory=lambda: np.zeros(0))


@dataclass(frozen=True, slots=True)
class SearchLimits:
    """When an integer search ends.

    Attributes:
        target: at a solution of this objective.
        enough_bound: once the bound is above this.
        abs_gap: when solution and bound are this near.
        work: after about so many simplex steps times rows.
        nodes: after so many nodes.
    """

    target: float
    enough_bound: float
    abs_gap: float
    work: float
    nodes: int = 200


def is_installed() -> bool:
    """Return True if HiGHS is installed."""
    return highspy is not None


class LPSolver(LinearProgram):
    """Columns and rows, handed to HiGHS in batches.

    Attributes:
        rows: those that HiGHS does not have yet.
        search_work: what integer searches took, in simplex steps times rows: the same on every machine.
        relax_work: what solving as it is took.
        out_of_work: True if the last call to solve ended for lack of work.
    """

    def __init__(self, until: float = INFINITY) -> None:
        """`until`: the `time.monotonic` at which to stop."""
        super().__init__()
        self.until = until
        with _silent():
            self.highs: Any = highspy.Highs()
        for option, value in OPTIONS.items():
            self.highs.setOptionValue(option, value)
        self.column_count = 0  # columns that HiGHS has
        self.out_of_work = False
        self.search_work = 0
        self.relax_work = 0

    def set_row_upper(self, row: int, most: float) -> None:
        """Give a row another upper end."""
        self._flush()
        self.highs.changeRowBounds(row, -INFINITY, most)

    def solve(self, work: float = INFINITY) -> Solution | None:
        """Minimise; return None if there is no solution, or if it takes more time or more work than allowed."""
        self._flush()
        self.highs.setOptionValue("simplex_iteration_limit", int(min(MOST_STEPS, work / max(1, self.row_count))))
        self._run()
        self.highs.setOptionValue("simplex_iteration_limit", MOST_STEPS)
        self.relax_work += max(0, self.highs.getInfo().simplex_iteration_count) * self.row_count
        self.out_of_work = self.highs.getModelStatus() == highspy.HighsModelStatus.kIterationLimit
        if self.highs.getModelStatus() == highspy.HighsModelStatus.kUnknown:
            self._run_without_presolve()
        if self.highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return None
        us = self.highs.getInfo().objective_function_value
        solution = self.highs.getSolution()
        values, reduced_costs = np.array(solution.col_value), np.array(solution.col_dual)
        return Solution(us, us, values, reduced_costs, np.array(solution.row_dual))

    def solve_integers(
        self, integers: Iterable[int], fixed: dict[int, float], limits: SearchLimits, start: Solution | None = None
    ) -> tuple[list[Solution], float]:
        """Search for solutions in which some columns are integers and some have fixed values.

        Returns those that were found, the best first, and a bound below all of them.  The search begins with `start`.
        """
        self._flush()
        columns = np.fromiter(integers, dtype=np.int32)
        for column, value in fixed.items():
            self.highs.changeColBounds(column, value, value)
        self._set_kind(columns, highspy.HighsVarType.kInteger)
        # With nothing fixed, these take as long as all the rest, for a solution or a bound that is hardly better.
        thorough = dict.fromkeys(("mip_allow_restart", "mip_heuristic_run_root_reduced_cost"), bool(fixed))
        options = {"mip_max_nodes": limits.nodes, "mip_abs_gap": limits.abs_gap, "objective_target": limits.target}
        for option, value in (options | thorough).items():
            self.highs.setOptionValue(option, value)
        if start is not None:
            self.highs.setSolution(len(columns), columns, np.round(start.values[columns]))
        self._run(steps=limits.work / self.row_count, enough_bound=limits.enough_bound)
        info = self.highs.getInfo()
        steps = max(0, info.simplex_iteration_count) + len(self.costs) // COLUMNS_PER_STEP
        self.search_work += steps * self.row_count
        solutions, status = self._saved_solutions(info.mip_dual_bound), self.highs.getModelStatus()
        self._set_kind(columns, highspy.HighsVarType.kContinuous)
        for column in fixed:
            self.highs.changeColBounds(column, *self.bounds[column])
        if status == highspy.HighsModelStatus.kInfeasible:
            return [], INFINITY
        return solutions, info.mip_dual_bound

    def _saved_solutions(self, bound_us: float) -> list[Solution]:
        """Return the solutions that the search found on its way, the best first."""
        saved = sorted(self.highs.getSavedMipSolutions(), key=lambda each: each.objective)
        solutions = ((each.objective, np.array(each.col_value)) for each in saved)
        return [Solution(us, bound_us, values, values) for us, values in solutions]

    def _run(self, steps: float = INFINITY, enough_bound: float = INFINITY) -> None:
        """Run HiGHS; a search ends after about so many steps, as counted when it looks at its limits.

        Raises:
            KeyboardInterrupt: the user has interrupted it; HiGHS has no solution then.
        """
        if self.until < INFINITY:
            left = max(0.0, self.until - time.monotonic())
            self.highs.setOptionValue("time_limit", self.highs.getRunTime() + left)
        kinds, taken = highspy.cb.HighsCallbackType, 0
        looks = kinds.kCallbackMipInterrupt, kinds.kCallbackSimplexInterrupt  # Python handles signals in both

        def look(kind: Any, message: str, out: Any, reply: Any, given: Any) -> None:
            nonlocal taken
            if kind != looks[0]:  # of the simplex, which has no such limits
                return
            taken += STEPS_PER_LOOK[out.mip_node_count > 0]
            reply.user_interrupt = taken >= steps or out.mip_dual_bound > enough_bound

        self.highs.setCallback(look, None)
        for each in looks:
            self.highs.startCallback(each)
        self.highs.run()
        for each in looks:
            self.highs.stopCallback(each)
        self.out_of_work = taken >= steps

    def _run_without_presolve(self) -> None:
        """Run HiGHS without presolve, which may leave a solution that HiGHS 1.15 can't call feasible, if a budget is
        met to the byte."""
        self.highs.setOptionValue("presolve", "off")
        self.highs.clearSolver()
        self._run()
        self.highs.setOptionValue("presolve", "choose")

    def _set_kind(self, columns: Any, kind: Any) -> None:
        self.highs.changeColsIntegrality(len(columns), columns, np.array([kind] * len(columns)))

    def _flush(self) -> None:
        """Hand new columns and rows to HiGHS."""
        if count := len(self.costs) - self.column_count:
            ends = np.array(self.bounds[self.column_count :], dtype=np.float64)
            self.highs.addVars(count, ends[:, 0].copy(), ends[:, 1].copy())
            columns = np.arange(self.column_count, len(self.costs), dtype=np.int32)
            self.highs.changeColsCost(count, columns, np.array(self.costs[self.column_count :], dtype=np.float64))
            self.column_count = len(self.costs)
        if self.rows:
            self._flush_rows()

    def _flush_rows(self) -> None:
        least, most, coefficients = zip(*self.rows, strict=True)
        starts = np.cumsum([0, *map(len, coefficients)])[:-1].astype(np.int32)
        columns = np.fromiter((column for row in coefficients for column in row), dtype=np.int32)
        values = np.fromiter((value for row in coefficients for value in row.values()), dtype=np.float64)
        ends = np.array(least, dtype=np.float64), np.array(most, dtype=np.float64)
        status = self.highs.addRows(len(least), *ends, len(columns), starts, columns, values)
        assert status == highspy.HighsStatus.kOk, "HiGHS refuses rows"
        self.rows = []


@contextmanager
def _silent() -> Iterator[None]:
    """Drop what C code prints on standard output: HiGHS 1.16 prints its version when the first model is made."""
    c = ctypes.CDLL(None)
    c.fflush(None)
    kept = os.dup(1)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    try:
        yield
    finally:
        c.fflush(None)
        os.dup2(kept, 1)
        os.close(kept)
