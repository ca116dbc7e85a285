"""Plans of steps with many equal layers, found in a program whose size does not grow with depth.

    4 layers, and one for 92   ->   at best 12.31 % are added; of the 92, 0.37 keep one thing and 0.63 another
    in blocks of 57, 1 and 34  ->   whole columns: 12.35 %   ->   what becomes of each layer   ->   12.36 %, fits

The bound is one of all plans of the class, as that of the full program is: see `sums`.  The simulator has the last
word.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from ...schedule.candidate import Candidate, make_candidate
from ...simulate.plan_result import PlanResult
from .. import memory_rows
from ..model import LONG, PlanModel
from ..occupancy import Occupancy
from ..problem import PlanProblem
from ..relax import converge, over_budget
from ..rounding import placements
from ..solver import INFINITY, SearchLimits, Solution
from ..transient_rows import add_recompute_row, positions_over_budget
from .layers import EqualLayers, find_equal_layers
from .problem import FoldedProgram
from .rows import sum_rows

LEAST = 64  # layers: fewer hardly take more time one by one
OUTER = 2  # layers at each end that stand for themselves alone
ENOUGH = 0.005  # of the step: a gap at which a plan is taken
AIM = 0.95  # of this gap, so that a simulation may say a little more
GRAIN = 0.001  # of the step: what a search leaves
MUCH = 1e-4  # of the step: what costs so much stays as it is
WORK = 1e7  # of one search; see `LPSolver.work`
SIMULATED = 2  # times at most
ROUNDS = 4  # in which whole columns are found over the budget, before a simulation


@dataclass(frozen=True, eq=False)
class Least:
    """The least point of a folded program, the positions that have rows, and what any plan adds."""

    model: PlanModel
    program: FoldedProgram
    solved: Solution
    any_us: float


def solve_folded(program: PlanProblem, until: float = INFINITY) -> PlanResult | None:
    """A plan that fits, with what is proven; None, if there are no such layers, or if a search of all does better."""
    found = find_equal_layers(program, LEAST) if program.size > LONG and not program.machine.link.out else None
    least = lowest(program, found, until) if found else None
    state = _rounded(program, least, until) if least else None
    if least is None or state is None:
        return None
    return PlanResult(state.plan, program.captured, state.forecast, least.solved.us, least.any_us)


def lowest(program: PlanProblem, found: EqualLayers, until: float = INFINITY) -> Least | None:
    """The least point that any mean of a plan of the class has; None, if none is found."""
    one = FoldedProgram(program.gaps, program.machine, program, found, OUTER, (found.count - 2 * OUTER,))
    if found.count <= 2 * OUTER or one.fixed[one.boundary - 1] < 0 or one.fixed[one.boundary] < 0:
        return None
    model = PlanModel(one, program.machine.budget, until)
    sum_rows(model, one)
    _write_sums(model, one.boundary - 1)
    forward = converge(
        model, lambda model, point: [p for p in over_budget(model, point) if p < one.boundary], _write_sums
    )
    if forward is None:
        return None
    _write_sums(model, one.boundary)
    solved = converge(model, over_budget, _write_sums)
    return None if solved is None else Least(model, one, solved, max(0.0, forward.us))


def _write_sums(model: PlanModel, position: int) -> None:
    """The rows of a position, summed over layers."""
    assert isinstance(model.problem, FoldedProgram)
    if position not in model.position_rows:
        before = model.lp.pending_rows
        model.lp.rewrite([])
        _write(model, position)
        held = model.lp.pending_rows[-1]  # the row of bytes is the last
        model.lp.rewrite(model.lp.pending_rows[:-1])
        sum_rows(model, model.problem)
        model.lp.rewrite([*before, *model.lp.pending_rows, held])


def _write(model: PlanModel, position: int) -> None:
    """The rows of a position as they are."""
    if position not in model.position_rows:
        model.position_rows.add(position)
        (memory_rows.add_forward_row if position < model.problem.boundary else memory_rows.add_backward_rows)(
            model, position
        )


def _rounded(program: PlanProblem, least: Least, until: float) -> Candidate | None:
    """A plan with whole columns that fits, and is near if all is as its point says; None, if none is found."""
    cuts = _cuts(least)
    count = least.program.layers.count - 2
    ends = sorted({0, count, *(end for cut in cuts.values() for end in (int(cut), int(cut) + 1))})
    sizes = tuple(size for a, b in pairwise(ends) for size in (b - a - 1, 1) if size)
    many = FoldedProgram(program.gaps, program.machine, program, least.program.layers, 1, sizes)
    model = PlanModel(many, program.machine.budget, until)
    fixed = dict(_fixed(model, many, least, cuts))
    for position in sorted(least.model.position_rows):
        _write(model, position)
    for _ in range(SIMULATED):
        point = _whole(model, least, fixed)
        if point is None:
            return None
        state = make_candidate(program.gaps, program.machine, many.unfolded(placements(model, point)))
        if state.peak <= program.machine.budget:
            return state
        for position, _, index in positions_over_budget(program, state.forecast, program.machine.budget):
            add_recompute_row(model, state.forecast, index, position)
    return None


def _cuts(least: Least) -> dict[float, float]:
    """For each share of what is kept by some layers, but not all: of the layers but the outermost, how many there are
    below those that do.

    0.37 of 92 keep one thing and 0.63 another.  Of the two, what has more bytes is kept by the last layers: backward
    begins there, and is at its fullest.
    """
    one, values = least.program, least.solved.values[least.model.keep]
    nbytes: dict[float, list[float]] = {}
    for o in one.layers.makers(one.last):
        for j, i in enumerate(one.made(o)):
            share = round(float(values[i]), 6)
            if 0.0 < share < 1.0:
                beside = sum(float(values[one.made(one.layers.moved(o, layer))[j]]) for layer in one.beside)
                much = nbytes.setdefault(share, [0.0, 0.0])
                much[0] += one.storages[i].nbytes
                much[1] += one.storages[i].nbytes * (share * one.blocks[0] + beside)
    return {
        share: min(one.layers.count - 3.0, max(0.0, one.layers.count - 2 - layers / much))
        for share, (much, layers) in nbytes.items()
        if much >= nbytes.get(round(1 - share, 6), [0.0])[0]
    }


def _fixed(
    model: PlanModel, many: FoldedProgram, least: Least, cuts: dict[float, float]
) -> Iterator[tuple[int, float]]:
    """The columns of what blocks keep, and of what it costs much to keep or not to; of layers at cuts only these."""
    one, solved = least.program, least.solved
    free = {int(cut) + 1 for cut in cuts.values()}
    for k, o in enumerate(many.chosen):
        layer = many.layers.of(o)
        in_block = layer in many.stands and layer not in free
        standing = one.layers.moved(o, one.last) if in_block else one.standing(o)
        for i, j in zip(many.producers[k].storages, one.made(standing), strict=True):
            column = least.model.keep[j]
            share, price = round(float(solved.values[column]), 6), float(solved.reduced_costs[column])
            if in_block and 0.0 < share < 1.0:
                cut = cuts[share] if share in cuts else cuts[round(1 - share, 6)]
                yield model.keep[i], float((layer - 1 > cut) == (share in cuts))
            elif in_block or abs(price) / one.stands_for(standing) > MUCH * one.captured.us:
                yield model.keep[i], share


def _whole(model: PlanModel, least: Least, fixed: dict[int, float]) -> Solution | None:
    """A point with whole columns that fits as far as rows say, and is near; None, if none is found."""
    us = model.problem.captured.us
    near = ENOUGH * (us + least.solved.us)
    effort = SearchLimits(least.solved.us + AIM * near, least.solved.us + near, GRAIN * us, WORK)
    for _ in range(ROUNDS):
        points, _ = model.lp.solve_integers(model.integer_columns, fixed, effort)
        if not points or points[0].us > least.solved.us + near:
            return None
        new = over_budget(model, Occupancy(model, points[0].values))
        if not new:
            return points[0]
        for position in new:
            _write(model, position)
    return None
