"""A linear program that grows, solved by HiGHS: as it is, or with some columns whole.

    x = linear.column(cost=2.0)
    linear.row(1.0, INFINITY, {x: 1.0})
    linear.solve()   ->   Solved(us=2.0, values=[1.0], prices=[0.0])

Work is limited in steps and nodes, so that the same program always has the same answer; in seconds only if somebody
gives a time at which to stop.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from ..ir.arrays import Floats

try:
    import highspy
except ImportError:  # the greedy pass does without
    highspy = cast(Any, None)

MISSING, INSTALL = "highspy is not installed", "pip install highspy"
INFINITY = math.inf
OPTIONS = {
    "output_flag": False,
    "threads": 1,
    "random_seed": 1,
    "mip_rel_gap": 0.0,  # of what a plan adds; what counts is the step, see `SearchLimits`
    "mip_improving_solution_save": True,
    "mip_feasibility_tolerance": 1e-9,  # with less, HiGHS 1.15 has called points optimal that were not
}
STEPS_PER_LOOK = 256, 16  # of the simplex method, between two looks of a search at its limits: at the root, below
MOST_STEPS = (1 << 31) - 1  # that HiGHS can be told of
COLUMNS_PER_STEP = 16  # so many are prepared for a search in the time of a step of the simplex method
Row = tuple[float, float, dict[int, float]]  # least, most, coefficient of each column


@dataclass(frozen=True, eq=False)
class Solution:
    """A point: its objective, a bound below all others, the value of every column, and what one more would cost."""

    us: float
    bound_us: float
    values: Floats
    reduced_costs: Floats


@dataclass(frozen=True, slots=True)
class SearchLimits:
    """When a search ends: at a point of `target`, at a bound above `enough`, when what is left to win is less than
    `grain`, or after about so much `work` and so many `nodes`."""

    target: float
    enough_bound: float
    abs_gap: float
    work: float
    nodes: int = 200


def is_installed() -> bool:
    """Whether HiGHS is installed."""
    return highspy is not None


class LPSolver:
    """Columns and rows; both are handed over in batches."""

    def __init__(self, until: float = INFINITY) -> None:
        """`until`: the time, as `time.monotonic` has it, from which on nothing is solved any more."""
        self.until = until
        self.highs: Any = highspy.Highs()
        for option, value in OPTIONS.items():
            self.highs.setOptionValue(option, value)
        self.bounds: list[tuple[float, float]] = []
        self.costs: list[float] = []
        self.row_count = 0
        self.pending_rows: list[Row] = []
        self.column_count = 0  # columns that HiGHS knows
        self.out_of_work = False  # whether what was solved last has ended for want of work
        self.search_work = 0  # of searches: steps of the simplex method times rows, which are the same on every machine
        self.relax_work = 0  # the same of what was solved as it is

    def add_column(self, cost: float = 0.0, least: float = 0.0, most: float = 1.0) -> int:
        self.bounds.append((least, most))
        self.costs.append(cost)
        return len(self.costs) - 1

    def add_row(self, least: float, most: float, coefficients: dict[int, float]) -> int:
        self.pending_rows.append((least, most, coefficients))
        self.row_count += 1
        return self.row_count - 1

    def rewrite(self, rows: list[Row]) -> None:
        """Put others in place of the rows that have not been handed over."""
        self.row_count += len(rows) - len(self.pending_rows)
        self.pending_rows = rows

    def set_row_upper(self, row: int, most: float) -> None:
        """Give a row another upper end."""
        self._hand_over()
        self.highs.changeRowBounds(row, -INFINITY, most)

    def solve(self, work: float = INFINITY) -> Solution | None:
        """The least objective; None if there is no point, or no time, or if it takes more work than that."""
        self._hand_over()
        self.highs.setOptionValue("simplex_iteration_limit", int(min(MOST_STEPS, work / max(1, self.row_count))))
        self._run()
        self.highs.setOptionValue("simplex_iteration_limit", MOST_STEPS)
        self.relax_work += max(0, self.highs.getInfo().simplex_iteration_count) * self.row_count
        self.out_of_work = self.highs.getModelStatus() == highspy.HighsModelStatus.kIterationLimit
        if self.highs.getModelStatus() == highspy.HighsModelStatus.kUnknown:
            self._run_as_written()
        if self.highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return None
        us = self.highs.getInfo().objective_function_value
        solution = self.highs.getSolution()
        return Solution(us, us, np.array(solution.col_value), np.array(solution.col_dual))

    def solve_integers(
        self, whole: Iterable[int], fixed: dict[int, float], effort: SearchLimits, known: Solution | None = None
    ) -> tuple[list[Solution], float]:
        """The points found whose columns `whole` are integers, the best first, and a bound below all such points; the
        search begins with the point that is `known`."""
        self._hand_over()
        columns = np.fromiter(whole, dtype=np.int32)
        for column, value in fixed.items():
            self.highs.changeColBounds(column, value, value)
        self._kind(columns, highspy.HighsVarType.kInteger)
        # With nothing fixed, these take as long as all the rest, for a point or a bound that is hardly better.
        thorough = dict.fromkeys(("mip_allow_restart", "mip_heuristic_run_root_reduced_cost"), bool(fixed))
        limits = {"mip_max_nodes": effort.nodes, "mip_abs_gap": effort.abs_gap, "objective_target": effort.target}
        for option, value in (limits | thorough).items():
            self.highs.setOptionValue(option, value)
        if known is not None:
            self.highs.setSolution(len(columns), columns, np.round(known.values[columns]))
        self._run(steps=effort.work / self.row_count, enough=effort.enough_bound)
        found = self.highs.getInfo()
        self.search_work += (
            max(0, found.simplex_iteration_count) + len(self.costs) // COLUMNS_PER_STEP
        ) * self.row_count
        points = self._points(found.mip_dual_bound)
        status = self.highs.getModelStatus()
        self._kind(columns, highspy.HighsVarType.kContinuous)
        for column in fixed:
            self.highs.changeColBounds(column, *self.bounds[column])
        if status == highspy.HighsModelStatus.kInfeasible:
            return [], INFINITY
        return points, found.mip_dual_bound

    def _points(self, bound_us: float) -> list[Solution]:
        """What the search has found, each better than the one after it."""
        saved = sorted(self.highs.getSavedMipSolutions(), key=lambda each: each.objective)
        points = ((each.objective, np.array(each.col_value)) for each in saved)
        return [Solution(us, bound_us, values, values) for us, values in points]

    def _run(self, steps: float = INFINITY, enough: float = INFINITY) -> None:
        """Solve; a search ends after about so many steps, by how often it has looked at its limits, and with a bound of
        `enough`."""
        if self.until < INFINITY:
            left = max(0.0, self.until - time.monotonic())
            self.highs.setOptionValue("time_limit", self.highs.getRunTime() + left)
        taken = 0

        def look(kind: Any, message: str, out: Any, say: Any, given: Any) -> None:
            nonlocal taken
            taken += STEPS_PER_LOOK[out.mip_node_count > 0]
            say.user_interrupt = taken >= steps or out.mip_dual_bound > enough

        self.highs.setCallback(look, None)
        self.highs.startCallback(highspy.cb.HighsCallbackType.kCallbackMipInterrupt)
        self.highs.run()
        self.highs.stopCallback(highspy.cb.HighsCallbackType.kCallbackMipInterrupt)
        self.out_of_work = taken >= steps

    def _run_as_written(self) -> None:
        """Solve without presolve: of what fits to the byte it may leave a point that HiGHS 1.15 can't call feasible."""
        self.highs.setOptionValue("presolve", "off")
        self.highs.clearSolver()
        self._run()
        self.highs.setOptionValue("presolve", "choose")

    def _kind(self, columns: Any, kind: Any) -> None:
        self.highs.changeColsIntegrality(len(columns), columns, np.array([kind] * len(columns)))

    def _hand_over(self) -> None:
        """Tell HiGHS what has been added since."""
        if count := len(self.costs) - self.column_count:
            ends = np.array(self.bounds[self.column_count :], dtype=np.float64)
            self.highs.addVars(count, ends[:, 0].copy(), ends[:, 1].copy())
            columns = np.arange(self.column_count, len(self.costs), dtype=np.int32)
            self.highs.changeColsCost(count, columns, np.array(self.costs[self.column_count :], dtype=np.float64))
            self.column_count = len(self.costs)
        if self.pending_rows:
            self._hand_over_rows()

    def _hand_over_rows(self) -> None:
        least, most, coefficients = zip(*self.pending_rows, strict=True)
        starts = np.cumsum([0, *map(len, coefficients)])[:-1].astype(np.int32)
        columns = np.fromiter((column for row in coefficients for column in row), dtype=np.int32)
        values = np.fromiter((value for row in coefficients for value in row.values()), dtype=np.float64)
        ends = np.array(least, dtype=np.float64), np.array(most, dtype=np.float64)
        status = self.highs.addRows(len(least), *ends, len(columns), starts, columns, values)
        assert status == highspy.HighsStatus.kOk, "HiGHS refuses rows"
        self.pending_rows = []
