"""A mixed-integer linear program, written column by column and row by row, and what HiGHS makes of it.

x = program.column(cost=3.0, integer=True)
program.row({x: 5.0, y: -1.0}, upper=2.0)     5 x - y <= 2
program.solve(seconds=10.0)                   -> Solution(us=3.0, bound=3.0, proven=True, values=(1.0, 3.0))
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import highspy
import numpy as np

SMALL = 2000  # columns with which HiGHS needs no presolve


@dataclass(frozen=True, slots=True)
class Solution:
    """The least cost found, and a lower bound of it; infinite cost and no values if nothing was found."""

    cost: float
    bound: float
    proven: bool
    values: tuple[float, ...]


@dataclass
class Program:
    """Columns between `lower` and 1, and rows with an upper bound."""

    costs: list[float] = field(default_factory=list)
    lowers: list[float] = field(default_factory=list)
    integers: list[bool] = field(default_factory=list)
    uppers: list[float] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])
    columns: list[int] = field(default_factory=list)
    factors: list[float] = field(default_factory=list)
    possible: bool = True  # no row without columns is violated: HiGHS does not take programs without columns

    def column(self, cost: float = 0.0, lower: float = 0.0, integer: bool = False) -> int:
        self.costs.append(cost)
        self.lowers.append(lower)
        self.integers.append(integer)
        return len(self.costs) - 1

    def row(self, factors: Mapping[int, float], upper: float) -> None:
        self.possible &= bool(factors) or upper >= 0
        self.columns += factors.keys()
        self.factors += factors.values()
        self.starts.append(len(self.columns))
        self.uppers.append(upper)

    def solve(self, seconds: float) -> Solution:
        if not (self.possible and self.costs):
            cost = 0.0 if self.possible else math.inf
            return Solution(cost, cost, True, ())
        highs = highspy.Highs()
        options = {
            "output_flag": False, "time_limit": seconds, "threads": 1, "mip_rel_gap": 0.0, "mip_abs_gap": 1e-6,
            # HiGHS 1.15's presolve has lost the optimum of a small program (step_of(random.Random(2934)), 24769 bytes).
            "presolve": "off" if len(self.costs) < SMALL else "choose", "mip_feasibility_tolerance": 1e-9,
        }  # fmt: skip
        for name, value in options.items():
            highs.setOptionValue(name, value)
        if highs.passModel(self._model()) == highspy.HighsStatus.kError:
            raise ValueError("HiGHS does not take the program")
        highs.run()
        status, info, none = highs.getModelStatus(), highs.getInfo(), highspy.HighsModelStatus
        if status in (none.kInfeasible, none.kUnboundedOrInfeasible):
            return Solution(math.inf, math.inf, True, ())
        bound = max(0.0, info.mip_dual_bound)
        if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            return Solution(math.inf, bound, False, ())
        values = tuple(highs.getSolution().col_value)
        return Solution(info.objective_function_value, bound, status == none.kOptimal, values)

    def _model(self) -> highspy.HighsLp:
        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = len(self.costs), len(self.uppers)
        model.col_cost_ = np.array(self.costs)
        model.col_lower_, model.col_upper_ = np.array(self.lowers), np.ones(len(self.costs))
        model.row_lower_, model.row_upper_ = np.full(len(self.uppers), -highspy.kHighsInf), np.array(self.uppers)
        model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        model.a_matrix_.start_ = np.array(self.starts, dtype=np.int32)
        model.a_matrix_.index_ = np.array(self.columns, dtype=np.int32)
        model.a_matrix_.value_ = np.array(self.factors, dtype=float)
        kinds = {True: highspy.HighsVarType.kInteger, False: highspy.HighsVarType.kContinuous}
        model.integrality_ = [kinds[integer] for integer in self.integers]
        return model
