"""Rows for what a re-run holds while it runs, which the rows of positions leave out.

    softmax runs again before g, over the budget by 55 MiB   ->   2.0 K_a + 8.0 K_b + ... + 55.0 R_softmax <= room

They say of the step as it was simulated what would have to change, and are wrong of steps that look different: good for
finding a plan that fits, and no part of any proof.
"""

from __future__ import annotations

from ..analysis.reuse_gaps import COPIES
from ..ir.ops import NARROW, OFFLOAD, rng_name
from ..simulate.forecast import Forecast
from .model import PlanModel
from .problem import PlanProblem
from .rows import MIB
from .solver import INFINITY

LEAVING = (NARROW, OFFLOAD)


def add_recompute_row(model: PlanModel, forecast: Forecast, index: int, position: int) -> int:
    """Write that what is there at op `index` of the simulated step, before `position` of the captured one, has to
    fit; the row."""
    gone = {op.reads[0] for op in forecast.trace.ops if op.fn in LEAVING}
    coefficients: dict[int, float] = {}
    held = 0
    homes = {resident.storage: h for h, resident in enumerate(model.problem.states)}
    makers = {rng_name(maker.value): o for o, maker in enumerate(model.problem.producers)}
    read = {held for value in forecast.trace.ops[index].reads for held in forecast.trace.op[value].holds}
    for life in forecast.live_at(index):
        made = forecast.trace.op[life.producer]
        if life.producer in makers:
            held += life.nbytes
            coefficients[model.recompute[makers[life.producer]]] = life.nbytes / MIB
        if life.storage in homes and life.storage not in read and life.first < index:
            coefficients[model.state.offload[homes[life.storage]]] = -life.nbytes / MIB
        i = model.problem.storage_index.get(model.problem.gaps.origin(life, made))
        if i is None or not (made.recomputes or _waits(model, i, position)):
            continue
        held += life.nbytes
        found = [model.keep[i], *([model.recompute[model.problem.storages[i].producer]] if made.recomputes else [])]
        if made.name in gone or made.fn in COPIES:
            found += model.copied_mib(i)
        for column in found:
            coefficients[column] = coefficients.get(column, 0.0) + life.nbytes / MIB
    fixed = float(forecast.total[index]) - held
    return model.lp.add_row(-INFINITY, (model.budget - fixed) / MIB, coefficients)


def add_reload_rows(model: PlanModel) -> list[int]:
    """Write that a re-run that reads what lives far costs a fetch of it; the rows.  One between two visits serves all
    re-runs there, and no visit: so plans are that share it, and this is no part of a proof."""
    program, rows, found = model.problem, list[int](), dict[tuple[int, int], int]()
    homes = {resident.storage: h for h, resident in enumerate(program.states)}
    for o, maker in enumerate(program.producers):
        op = program.gaps.trace.op[maker.value]
        read = {held for value in op.reads for held in program.gaps.trace.op[value].holds}
        for h in sorted(homes[storage] for storage in read & homes.keys()):
            resident = program.states[h]
            rest = sum(first <= program.wanted[1][o] for first, _ in resident.uses)
            if (h, rest) not in found:
                found[h, rest] = model.lp.add_column(resident.nbytes / program.machine.link.back)
            rows.append(
                model.lp.add_row(
                    -INFINITY, 1.0, {model.recompute[o]: 1.0, model.state.offload[h]: 1.0, found[h, rest]: -1.0}
                )
            )
    return rows


def positions_over_budget(program: PlanProblem, forecast: Forecast, budget: int) -> list[tuple[int, int, int]]:
    """The positions of the captured trace at which, or just before which, the step is over the budget; its bytes
    there, and the index in the step as it runs."""
    places, worst = program.gaps.index, dict[int, tuple[int, int, int]]()
    position = program.size - 1
    for index in reversed(range(len(forecast.trace.ops))):
        position = places.get(forecast.trace.ops[index].name, position)
        nbytes = int(forecast.total[index])
        if nbytes > max(budget, worst.get(position, (0, 0))[1]):
            worst[position] = position, nbytes, index
    return list(worst.values())


def _waits(model: PlanModel, i: int, position: int) -> bool:
    """Whether an item that is there is in its gap, so that it might as well not be there."""
    item = model.problem.storages[i]
    return item.last_forward < position <= item.first_backward
