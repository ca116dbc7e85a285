"""Derive a bound from dual values of the linear program, without a solver and in exact arithmetic.

    proven_us(trace, machine, BoundProof(added=(("once", 812), ...), duals={3: 1.25, ...}))   ->   4391.2

For any y, the least of c x under L <= A x <= U and l <= x <= u is at least

    sum over rows of (y > 0 ? y L : y U)  +  sum over columns of the least of (c - y A) x between l and u

(weak duality of linear programs).  So dual values need not be right: wrong ones prove less.  Columns without an upper
end are microseconds or MiB; no plan needs more of them than all ops and copies take, or than all storages have.
"""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction

from ..analysis.reuse_gaps import ReuseGaps
from ..ir.machine import Machine
from ..ir.trace import Trace
from ..simulate.bound_proof import BoundProof
from .columns import MIB
from .linear_program import INFINITY, LinearProgram, Row
from .model import PlanRows
from .problem import PlanProblem


def proven_us(trace: Trace, machine: Machine, proof: BoundProof) -> float:
    """Return the microseconds that every plan of the proof's class adds to the step, derived without a solver.

    Raises:
        ValueError: the proof is of another program.
    """
    problem, program = PlanProblem(ReuseGaps(trace), machine.joined), LinearProgram()
    rows = PlanRows(program, problem, machine.budget)
    for kind, position in proof.added:
        if not 0 <= position < problem.size:
            raise ValueError(f"the proof adds rows of op {position}, and the step has {problem.size}")
        for row in rows.add(kind, position):  # of reloads, which no proof counts
            program.rows[row] = (program.rows[row][0], INFINITY, program.rows[row][2])
    if program.row_count != proof.row_count or not all(0 <= row < program.row_count for row in proof.duals):
        raise ValueError(f"the proof is of {proof.row_count} rows, and this step's program has {program.row_count}")
    most = Fraction(max(_all_us(problem), _all_mib(problem)))
    return float(least_objective(program, proof.duals, most) - Fraction(rows.columns.tie_us))


def least_objective(program: LinearProgram, duals: dict[int, float], most: Fraction) -> Fraction:
    """Return what the dual values prove of the objective, where columns without an upper end are at most `most`."""
    sides, reduced = Fraction(0), defaultdict(Fraction, {j: Fraction(cost) for j, cost in enumerate(program.costs)})
    for row, dual in duals.items():
        y = Fraction(dual)
        side = _side(program.rows[row], dual)
        if side is None:
            continue
        sides += y * side
        for column, coefficient in program.rows[row][2].items():
            reduced[column] -= y * Fraction(coefficient)
    ends = (_least(cost, *program.bounds[column], most) for column, cost in reduced.items())
    return sides + sum(ends, Fraction(0))


def _side(row: Row, dual: float) -> Fraction | None:
    """Return the end of a row that its dual value is multiplied with; None if it has none there."""
    end = row[0] if dual > 0 else row[1]
    return None if abs(end) == INFINITY else Fraction(end)


def _least(cost: Fraction, low: float, high: float, most: Fraction) -> Fraction:
    if cost >= 0:
        return cost * Fraction(low)
    return cost * (most if high == INFINITY else Fraction(high))


def _all_us(problem: PlanProblem) -> float:
    """Return the microseconds of all ops twice, and of a copy of everything both ways."""
    link, nbytes = problem.machine.link, sum(problem.gaps.trace.nbytes.values())
    copies = nbytes / link.out + nbytes / link.back if link.works else 0.0
    return 2 * problem.captured.us + copies


def _all_mib(problem: PlanProblem) -> float:
    return 2 * sum(problem.gaps.trace.nbytes.values()) / MIB
