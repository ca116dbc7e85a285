"""The choices for one value: what no plan with each goes below, or why there is no such plan.

choices(result, machine, "a")   ->   recompute   the plan has it: 40.3 ms
                                     keep        no plan has it: mm_9 would be over the budget
                                     offload     no plan with it takes less than 42.0 ms

For each choice the linear program is solved once more with that choice given, and all else free: what it then proves
holds for every plan of the class that makes the choice.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from .analysis.reuse_gaps import ReuseGaps
from .ir.decisions import Offload, Plan, Recompute, Stream
from .ir.machine import SMALLEST_STREAMED, Machine
from .ir.trace import Op, Trace
from .lp.linear_program import INFINITY
from .lp.model import ANY_PLAN, ONCE, PlanModel
from .lp.problem import SMALLEST_OFFLOAD, PlanProblem, StorageVar
from .lp.relax import relax
from .simulate.plan_result import PlanResult

KEEP, RECOMPUTE, OFFLOAD, CAST = KINDS = ("keep", "recompute", "offload", "cast and offload")
ALWAYS = (KEEP, RECOMPUTE, OFFLOAD)  # of an activation, also where it can't be
NOT_COPIED = "nothing can be offloaded: the plan has no tier, or its copies were not measured"


@dataclass(frozen=True, slots=True)
class Choice:
    """One thing that a plan may do with a value.

    Attributes:
        kind: one of `KINDS`.
        taken: True if the plan does it.
        least_us: microseconds of a step below which no plan that does it is; infinity if there is none.
        why_not: why no plan does it; empty if there may be one.
    """

    kind: str
    taken: bool
    least_us: float
    why_not: str = ""


def choices(result: PlanResult, machine: Machine, value: str, kind: str | None = None) -> tuple[Choice, ...]:
    """Return what a plan has chosen for a value, and behind it the other choices, or the one of this kind.

    A value is chosen for with its storage, which its views share.

    Raises:
        ValueError: the step has no such value, nothing is decided of it, or there is no such kind.
    """
    return first_choices(result, machine, (value,), kind)[1]


def first_choices(
    result: PlanResult, machine: Machine, values: Sequence[str], kind: str | None = None
) -> tuple[str, tuple[Choice, ...]]:
    """Return the first of some values that anything is decided of, and its choices.

    Raises:
        ValueError: as `choices`, of the last of them.
    """
    if kind not in (None, *KINDS):
        raise ValueError(f"there is no choice {kind!r}; give one of {', '.join(map(repr, KINDS))}")
    problem = PlanProblem(ReuseGaps(result.captured.trace), machine.joined)
    *others, last = values
    for value in others:
        with suppress(ValueError):
            return value, _choices(problem, result, value, kind)
    return last, _choices(problem, result, last, kind)


def _choices(problem: PlanProblem, result: PlanResult, value: str, kind: str | None) -> tuple[Choice, ...]:
    storage = _storage(problem.gaps.trace, value)
    if not (possible := _possible(problem, storage, result.plan)):
        raise ValueError(f"nothing is decided of {value!r}: {_fixed(problem, storage)}")
    taken = _taken(problem.gaps, result.plan, storage)
    always = ALWAYS if storage in problem.storage_index else ()
    asked = (kind,) if kind else [each for each in KINDS if each in (*always, *possible)]
    kinds = dict.fromkeys((taken, *asked))
    return tuple(_choice(problem, result, storage, each, each == taken, each in possible) for each in kinds)


def named_values(trace: Trace, name: str) -> list[str]:
    """Return the value of this name, or those that forward makes in the submodule of this path, the largest first.

    A parameter has its path, too. A view stands for the value whose memory it shows, and what recomputes a value, as
    `gelu__1` of the planned step, for that value.

    Raises:
        ValueError: there is none.
    """
    base, _, number = name.rpartition("__")
    for each in (name, base) if number.isdigit() else (name,):
        if each in trace.op:
            return [_shown(trace, each)]
    paths = {op.name: op.where.partition(" ")[0] for op in trace.ops if op.phase == "forward"}
    found = [trace.op[value] for value, path in paths.items() if path and f"{path}.".startswith(f"{name}.")]
    made = [op for op in found if len(op.holds) == 1 and (op.makes or op.fn == "getitem")]
    if made:
        return [op.name for op in sorted(made, key=lambda op: (op.is_input, -trace.nbytes[op.holds[0]]))]
    near = difflib.get_close_matches(name, sorted({*trace.op, *paths.values()}), 3)
    raise ValueError(
        f"the step has no value {name!r}, and no submodule of this path makes one"
        + (f"; near to it are {', '.join(map(repr, near))}" if near else "")
    )


def _shown(trace: Trace, value: str) -> str:
    """Return the value whose memory a view shows; one that is no view is its own."""
    op = trace.op[value]
    if op.makes or op.is_input or op.fn == "getitem" or len(op.holds) != 1:
        return value
    return next(each.name for each in trace.ops if each.holds == op.holds)


def _choice(
    problem: PlanProblem, result: PlanResult, storage: str, kind: str, taken: bool, is_possible: bool
) -> Choice:
    if not is_possible:
        if taken:  # by a pass that does more than the program: it makes small copies, where nothing else fits
            return Choice(kind, True, result.lower_bound)
        return Choice(kind, False, INFINITY, _absent(problem, storage, kind))
    model = PlanModel(problem, problem.machine.budget)
    for column, number in _given(model, storage, kind).items():
        model.lp.bounds[column] = (number, number)
    relaxed = relax(model)
    if relaxed is None:
        return Choice(kind, taken, INFINITY, _row(model, ANY_PLAN))
    added_us = relaxed.any_us
    if result.is_single:
        if relaxed.solution is None:
            return Choice(kind, taken, INFINITY, _row(model, ONCE))
        added_us = max(0.0, relaxed.solution.us - model.columns.tie_us)
    return Choice(kind, taken, result.captured.us + added_us)


def _storage(trace: Trace, value: str) -> str:
    """Return the storage that a value holds.

    Raises:
        ValueError: it holds none, or several.
    """
    held = trace.op[value].holds
    if len(held) != 1:
        items = [op.name for op in trace.ops if op.fn == "getitem" and value in op.reads]
        advice = f"; ask for {' or '.join(items)}" if items else ""
        raise ValueError(f"{value!r} is {'several tensors' if held else 'no tensor'}{advice}")
    return held[0]


def _taken(gaps: ReuseGaps, plan: Plan, storage: str) -> str:
    """Return what a plan does with a storage."""
    for each in plan:
        if isinstance(each, Offload | Stream) and gaps.trace.op[each.value].holds == (storage,):
            return CAST if isinstance(each, Offload) and each.wire else OFFLOAD
    made = [value for value in gaps.values.get(storage, ()) if gaps.trace.op[value].fn == "getitem"]
    made = made or [gaps.producer.get(storage, "")]
    return RECOMPUTE if any(isinstance(each, Recompute) and each.value in made for each in plan) else KEEP


def _possible(problem: PlanProblem, storage: str, plan: Plan) -> tuple[str, ...]:
    """Return what the program decides of a storage."""
    if any(state.storage == storage for state in problem.states):
        return KEEP, OFFLOAD
    item = _item(problem, storage)
    if item is None or not _is_read_again(problem, item, plan):
        return ()
    return tuple(_kinds(problem, item))


def _kinds(problem: PlanProblem, item: StorageVar) -> Iterator[str]:
    yield KEEP
    if not problem.producers[item.producer].runs_once:
        yield RECOMPUTE
    if item.can_offload:
        yield OFFLOAD
    if item.wire_nbytes:
        yield CAST


def _given(model: PlanModel, storage: str, kind: str) -> dict[int, float]:
    """Return the columns of a storage with the values that make a choice."""
    problem, columns = model.problem, model.columns
    for state, column in zip(problem.states, columns.state.offload, strict=True):
        if state.storage == storage:
            return {column: float(kind == OFFLOAD)}
    i = problem.storage_index[storage]
    ways = ((KEEP, columns.keep[i]), (OFFLOAD, columns.offload.get(i)), (CAST, columns.cast_offload.get(i)))
    return {column: float(way == kind) for way, column in ways if column is not None}


def _item(problem: PlanProblem, storage: str) -> StorageVar | None:
    return problem.storages[problem.storage_index[storage]] if storage in problem.storage_index else None


def _is_read_again(problem: PlanProblem, item: StorageVar, plan: Plan) -> bool:
    """Return True if backward reads a storage, or an op does that the plan recomputes."""
    again = {each.value for each in plan if isinstance(each, Recompute)}
    return item.first_backward < problem.size or any(problem.producers[w].value in again for w in item.readers)


def _fixed(problem: PlanProblem, storage: str) -> str:
    """Return why nothing is decided of a storage."""
    trace = problem.gaps.trace
    made = next(op for op in trace.ops if storage in op.holds)
    if storage in problem.storage_index:
        return "it is freed in forward, for backward does not read it, and what the plan recomputes does not either"
    if made.is_input:
        return _why_state_stays(problem, made)
    if made.phase != "forward":
        return "backward makes it and uses it up"
    return "the step returns it, and the caller holds it"


def _why_state_stays(problem: PlanProblem, op: Op) -> str:
    machine, nbytes = problem.machine, op.nbytes
    if op.fn not in ("parameter", "gradient", "state"):
        return f"it is {'an' if op.fn[0] in 'aeiou' else 'a'} {op.fn} of the step, and stays on the device"
    if not machine.link.works:
        return NOT_COPIED
    if not machine.streaming.enabled:
        return f"a {op.fn} is offloaded only with an optimizer whose update can be cut, and there is none in the plan"
    if nbytes < SMALLEST_STREAMED:
        return f"it has {nbytes} bytes, and a {op.fn} of fewer than {SMALLEST_STREAMED} stays on the device"
    return f"this {op.fn} is in use throughout, or shares its memory with another tensor"


def _absent(problem: PlanProblem, storage: str, kind: str) -> str:
    """Return why the program has no column for a choice."""
    item = _item(problem, storage)
    if item is None:
        return "it is no activation: forward does not make it"
    if kind == RECOMPUTE:
        return f"{problem.producers[item.producer].value} may run only once"
    if not problem.machine.link.works:
        return NOT_COPIED
    if kind == CAST and item.can_offload:
        return "values are not rounded: that needs wire_dtype=, and a tensor of float32"
    if item.nbytes < SMALLEST_OFFLOAD:
        return f"it has {item.nbytes} bytes, and a copy of fewer than {SMALLEST_OFFLOAD} does not pay"
    return "no value is all of its memory and nothing else, so there is none to copy"


def _row(model: PlanModel, rows: str) -> str:
    """Return the row of memory that no solution with the choice satisfies: the last that was added."""
    position = next((at for kind, at in model.rows.added[::-1] if kind in (rows, ONCE)), None)
    if position is None:
        return "the tier has no room for it"
    op = model.problem.gaps.trace.ops[position]
    named = f"{op.name} ({', '.join(filter(None, (op.fn, op.where)))})"
    plans = "no plan that recomputes each value at most once has it" if rows == ONCE else "no plan has it"
    return f"{plans}: {named} would be over the budget"
