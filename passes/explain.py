"""What is in the way of a budget, in words: the op, the bytes there, the source lines, and what would help.

1500 bytes are allowed; the smallest budget for which a plan was found is 2150.
It needs most at b (gelu, layers.0 model.py:8); on cpu lie there: ...
No plan can do with less than 2100 bytes: so many are in use at q (gelu_backward) at the same time: ...
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from .analysis.reuse_gaps import ReuseGaps
from .ir.liveness import Lifetime
from .ir.machine import Machine
from .ir.trace import Op, Trace
from .lp.problem import PlanProblem
from .simulate.forecast import Forecast

TOP = 8  # of what is in the way, so many are named
MUCH = 0.25  # of what lies there: a kind that makes up so much is worth a lever
LOSSES = ("log_softmax", "cross_entropy", "nll_loss", "logsumexp")
STATE = ("parameter", "gradient", "state")
HELP = {
    "parameter": "fewer or smaller parameters, e.g. a smaller dtype",
    "buffer": "fewer or smaller buffers",
    "state": "an optimizer that keeps less, e.g. SGD or Adafactor",
    "gradient": "fewer parameters that require a gradient",
}
SMALLER = "a smaller batch (the same batch in several parts, whose gradients add up)"
PARTS = "microbatches=2 or more (the same batch in several parts, within the step)"
CHUNKS = "a loss that is computed in chunks"
TIER = "a far tier (offload='auto')"
STREAM = "state that lives on disk (offload='auto', and an optimizer that updates each element for itself, e.g. AdamW)"


def explain_infeasible(forecast: Forecast, machine: Machine, captured: Trace) -> str:
    """What was wanted, what is, where, and what to do."""
    op, there = forecast.trace.ops[forecast.peak_index], forecast.live_at(forecast.peak_index)
    op = replace(
        op, workspace=int(forecast.by_kind["workspace"][forecast.peak_index])
    )  # of an update, that of its window
    lines = [
        f"{machine.budget} bytes are allowed; the smallest budget for which a plan was found is {forecast.peak}.",
        f"It needs most at {_named(op)}; on {machine.device} lie there:",
        *_listed(forecast.trace, op, there, forecast.peak),
    ]
    least = f"Give budget={forecast.peak}"
    floor = _floor(captured, machine)
    if floor is None:
        # What lies there might as well lie elsewhere, if there were a place for it.
        levers = [*([] if machine.link.out else [TIER]), *_levers(forecast.trace, op, there, machine)]
        return "\n".join([*lines, f"{least}, or {' or '.join(levers)}."])
    program, at = floor
    known = captured.ops[at].name == op.name
    there, nbytes = _in_use(program, at), int(program.floor[at])
    op = replace(captured.ops[at], workspace=program.least_workspace(at))
    where = f"{op.name} at the same time." if known else f"{_named(op)} at the same time:"
    lines.append(f"No plan can do with less than {nbytes} bytes: so many are in use at {where}")
    lines += [] if known else _listed(captured, op, there, nbytes)
    return "\n".join([*lines, f"{least}, or {' or '.join(_levers(captured, op, there, machine))}."])


def _floor(captured: Trace, machine: Machine) -> tuple[PlanProblem, int] | None:
    """Where more than the budget must lie there at the same time whatever is decided."""
    program = PlanProblem(ReuseGaps(captured), machine)
    if int(program.floor.max(initial=0.0)) <= machine.budget:
        return None
    return program, int(np.argmax(program.floor))


def _named(op: Op) -> str:
    return f"{op.name} ({', '.join(filter(None, (op.fn, op.where)))})"


def _listed(trace: Trace, op: Op, there: tuple[Lifetime, ...], nbytes: int) -> list[str]:
    """A line for each of the largest, and, if there is any, for the rest of the `nbytes` and the workspace of `op`."""
    lines = []
    for life in there[:TOP]:
        maker = trace.op[life.producer]
        lines.append(f"  {life.nbytes:>14} bytes  {life.kind:<10} {life.storage} {maker.type} {maker.where}".rstrip())
    rest = nbytes - op.workspace - sum(life.nbytes for life in there[:TOP])
    if rest or len(there) > TOP:
        lines.append(f"  {rest:>14} bytes  in {max(0, len(there) - TOP)} smaller tensors and the staging of copies")
    if op.workspace:
        lines.append(f"  {op.workspace:>14} bytes  workspace  of {op.name} itself")
    return lines


def _in_use(program: PlanProblem, at: int) -> tuple[Lifetime, ...]:
    """What is there at a position whatever is decided: see `LinearProgram.floor`."""
    ops = program.gaps.trace.ops
    far = {each.storage for each in program.states for rest in each.gaps(program.size) if rest.first <= at < rest.last}
    read = {held for value in ops[at].reads for held in program.gaps.trace.op[value].holds}

    def stays(life: Lifetime) -> bool:
        if life.storage not in program.storage_index:
            return life.storage not in far
        item = program.storages[program.storage_index[life.storage]]
        return (
            life.storage in read
            if at >= program.boundary
            else not (item.last_forward < at < item.first_backward < program.size)
        )

    return tuple(life for life in program.captured.live_at(at) if stays(life))


def _levers(trace: Trace, op: Op, there: tuple[Lifetime, ...], machine: Machine) -> list[str]:
    """What lowers that of which most lies there."""
    kinds = Counter({"workspace": op.workspace})
    for life in there:
        kinds[life.kind] += life.nbytes
    much = [kind for kind, nbytes in kinds.most_common() if nbytes >= MUCH * kinds.total()] or ["workspace"]
    levers = [HELP.get(kind, SMALLER) for kind in much]
    if any(kind in STATE for kind in much) and machine.device == "cpu" and not machine.streaming.enabled:
        levers.append(STREAM)
    if _is_loss([op, *(trace.op[life.producer] for life in there[:2])]):
        levers.append(CHUNKS)
    return list(dict.fromkeys(levers))


def _is_loss(ops: Iterable[Op]) -> bool:
    """Whether the peak is the loss's: at it, or in what it has made."""
    return any(name in op.fn for op in ops for name in LOSSES)
