"""Rows for memory that recomputations take while they run, which the rows of positions leave out.

    softmax runs again before g, over the budget by 55 MiB
        ->   2.0 keep[a] + 8.0 keep[b] + ... + 55.0 recompute[softmax] <= budget

Such a row says how one simulated step would have to change.  It is wrong of steps that look different: good for
finding a plan that fits, and no part of any proof.
"""

from __future__ import annotations

from ..analysis.reuse_gaps import COPIES
from ..ir.ops import NARROW, OFFLOAD, rng_name
from ..simulate.forecast import Forecast
from .columns import MIB, Terms
from .model import PlanModel
from .problem import PlanProblem
from .solver import INFINITY

LEAVING = (NARROW, OFFLOAD)


def add_recompute_row(model: PlanModel, forecast: Forecast, index: int, position: int) -> int:
    """Add a row by which op `index` of a simulated step, before `position` of the captured one, fits the budget.

    Returns the index of the row.
    """
    problem, columns, terms = model.problem, model.columns, Terms()
    trace, decided = forecast.trace, 0
    offloaded = {op.reads[0] for op in trace.ops if op.fn in LEAVING}
    states = {state.storage: r for r, state in enumerate(problem.states)}
    rng_producers = {rng_name(producer.value): o for o, producer in enumerate(problem.producers)}
    read = {storage for value in trace.ops[index].reads for storage in trace.op[value].holds}
    for life in forecast.live_at(index):
        op = trace.op[life.producer]
        if life.producer in rng_producers:
            decided += life.nbytes
            terms[columns.recompute[rng_producers[life.producer]]] = life.nbytes / MIB
        if life.storage in states and life.storage not in read and life.first < index:
            terms[columns.state.offload[states[life.storage]]] = -life.nbytes / MIB
        i = problem.storage_index.get(problem.gaps.origin(life, op))
        if i is None or not (op.recomputes or _is_in_gap(problem, i, position)):
            continue
        decided += life.nbytes
        causes = [columns.keep[i]]
        if op.recomputes:
            causes.append(columns.recompute[problem.storages[i].producer])
        if op.name in offloaded or op.fn in COPIES:
            causes += columns.copied_mib(i)
        for column in causes:
            terms[column] = terms.get(column, 0.0) + life.nbytes / MIB
    fixed = float(forecast.total[index]) - decided
    return model.lp.add_row(-INFINITY, (model.budget - fixed) / MIB, terms)


def add_reload_rows(model: PlanModel) -> list[int]:
    """Add rows by which a recomputation that reads offloaded state costs a reload; return their indices.

    A reload serves all recomputations between two uses of the state.  Plans may share the reload of a use instead, so
    these rows are no part of a proof.
    """
    problem, columns, rows, reloads = model.problem, model.columns, list[int](), dict[tuple[int, int], int]()
    states = {state.storage: r for r, state in enumerate(problem.states)}
    trace = problem.gaps.trace
    for o, producer in enumerate(problem.producers):
        read = {storage for value in trace.op[producer.value].reads for storage in trace.op[value].holds}
        for r in sorted(states[storage] for storage in read & states.keys()):
            state = problem.states[r]
            gap = sum(first <= problem.first_reruns[o] for first, _ in state.uses)
            if (r, gap) not in reloads:
                reloads[r, gap] = model.lp.add_column(state.nbytes / problem.machine.link.back)
            terms = {columns.recompute[o]: 1.0, columns.state.offload[r]: 1.0, reloads[r, gap]: -1.0}
            rows.append(model.lp.add_row(-INFINITY, 1.0, terms))
    return rows


def positions_over_budget(problem: PlanProblem, forecast: Forecast, budget: int) -> list[tuple[int, int, int]]:
    """Return where a simulated step is over the budget: captured position, bytes, index of the op as simulated.

    An op that is not in the captured trace counts for the position behind it.
    """
    positions, worst = problem.gaps.index, dict[int, tuple[int, int, int]]()
    position = problem.size - 1
    for index in reversed(range(len(forecast.trace.ops))):
        position = positions.get(forecast.trace.ops[index].name, position)
        nbytes = int(forecast.total[index])
        if nbytes > max(budget, worst.get(position, (0, 0))[1]):
            worst[position] = position, nbytes, index
    return list(worst.values())


def _is_in_gap(problem: PlanProblem, i: int, position: int) -> bool:
    return problem.storages[i].last_forward < position <= problem.storages[i].first_backward
