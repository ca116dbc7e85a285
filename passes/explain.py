"""Explain why no plan fits a budget: the op at the peak, what is live there, its source lines, and what acts on that.

1500 bytes are allowed; the smallest budget for which a plan was found is 2150.
Peak memory is at b (gelu, layers.0 model.py:8). Live on cpu at that point: ...
No plan can use less than 2100 bytes: that many are in use at q (gelu_backward) at the same time: ...
Most of that is activation (1800 bytes).
Give budget=2150, or smaller batches, ...

Nothing is tried for it: the forecast has the bytes of each kind, and each kind has its options.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from .analysis.reuse_gaps import ReuseGaps
from .ir.liveness import Lifetime
from .ir.machine import Machine
from .ir.trace import Op, Trace
from .lp.problem import PlanProblem
from .simulate.forecast import Forecast

TOP = 8  # tensors that are listed
MUCH = 0.25  # share of the peak from which on a kind of memory is worth advice
LOSSES = ("log_softmax", "cross_entropy", "nll_loss", "logsumexp")
STATE = ("parameter", "gradient", "state")
HELP = {
    "parameter": "fewer or smaller parameters, e.g. a smaller dtype",
    "buffer": "fewer or smaller buffers",
    "state": "an optimizer that keeps less, e.g. SGD or Adafactor",
    "gradient": "fewer parameters that require a gradient, or fuse_update=True",
}
SMALLER = (
    "smaller batches, whose gradients add up, or microbatches= (the batch in more parts within the step), if its rows "
    "do not need each other"
)
CHUNKS = "a loss that is computed in chunks, as with slices='auto'"
TIER = "a tier to offload to (offload='auto')"
STREAM = "state that is offloaded to disk (offload='auto', and an element-wise optimizer, e.g. AdamW)"


def explain_infeasible(forecast: Forecast, machine: Machine, captured: Trace) -> str:
    """Return the message of the error: the budget, the peak, what is live there, and what to do."""
    op, live = forecast.trace.ops[forecast.peak_index], forecast.live_at(forecast.peak_index)
    op = replace(op, workspace=int(forecast.by_kind["workspace"][forecast.peak_index]))
    lines = [
        f"{machine.budget} bytes are allowed; the smallest budget for which a plan was found is {forecast.peak}.",
        f"Peak memory is at {_named(op)}. Live on {machine.device} at that point:",
        *_listed(forecast.trace, op, live, forecast.peak),
    ]
    floor = _floor(captured, machine)
    if floor is None:
        return "\n".join([*lines, _advice(forecast, op, live, machine, [] if machine.link.out else [TIER])])
    program, at = floor
    is_peak = captured.ops[at].name == op.name
    live, nbytes = _in_use(program, at), int(program.floor[at])
    op = replace(captured.ops[at], workspace=program.least_workspace(at))
    where = f"{op.name} at the same time." if is_peak else f"{_named(op)} at the same time:"
    lines.append(f"No plan can use less than {nbytes} bytes: that many are in use at {where}")
    lines += [] if is_peak else _listed(captured, op, live, nbytes)
    return "\n".join([*lines, _advice(forecast, op, live, machine)])


def _floor(captured: Trace, machine: Machine) -> tuple[PlanProblem, int] | None:
    """Return the op at which every plan needs more than the budget, if there is one."""
    program = PlanProblem(ReuseGaps(captured), machine)
    return None if program.least_nbytes <= machine.budget else (program, int(np.argmax(program.floor)))


def _named(op: Op) -> str:
    return f"{op.name} ({', '.join(filter(None, (op.fn, op.where)))})"


def _listed(trace: Trace, op: Op, live: tuple[Lifetime, ...], nbytes: int) -> list[str]:
    """Return a line for each of the largest tensors, one for the rest of the `nbytes`, and one for the workspace."""
    lines = []
    for life in live[:TOP]:
        producer = trace.op[life.producer]
        lines.append(
            f"  {life.nbytes:>14} bytes  {life.kind:<10} {life.storage} {producer.type} {producer.where}".rstrip()
        )
    rest = nbytes - op.workspace - sum(life.nbytes for life in live[:TOP])
    if rest or len(live) > TOP:
        lines.append(f"  {rest:>14} bytes  in {max(0, len(live) - TOP)} smaller tensors and the staging of copies")
    if op.workspace:
        lines.append(f"  {op.workspace:>14} bytes  workspace  of {op.name} itself")
    return lines


def _in_use(program: PlanProblem, at: int) -> tuple[Lifetime, ...]:
    """Return what is live at a position whatever is decided: see `PlanProblem.floor`."""
    ops = program.gaps.trace.ops
    offloadable = {
        each.storage for each in program.states for rest in each.gaps(program.size) if rest.first <= at < rest.last
    }
    read = program.gaps.trace.held_by(ops[at].reads)

    def stays(life: Lifetime) -> bool:
        if life.storage not in program.storage_index:
            return life.storage not in offloadable
        item = program.storages[program.storage_index[life.storage]]
        return (
            life.storage in read
            if at >= program.boundary
            else not (item.last_forward < at < item.first_backward < program.size)
        )

    return tuple(life for life in program.captured.live_at(at) if stays(life))


def _advice(
    forecast: Forecast, op: Op, live: tuple[Lifetime, ...], machine: Machine, first: Sequence[str] = ()
) -> str:  # fmt: skip
    """Name the largest kinds of memory at the peak, and what acts on these."""
    kinds = Counter({"workspace": op.workspace})
    for life in live:
        kinds[life.kind] += life.nbytes
    much = [kind for kind, nbytes in kinds.most_common() if nbytes >= MUCH * kinds.total()] or ["workspace"]
    advice = [*first, *(HELP.get(kind, SMALLER) for kind in much)]
    if any(kind in STATE for kind in much) and machine.device == "cpu" and not machine.streaming.enabled:
        advice.append(STREAM)
    if _is_loss([op, *(forecast.trace.op[life.producer] for life in live[:2])]):
        advice.append(CHUNKS)
    most = " and ".join(f"{kind} ({kinds[kind]} bytes)" for kind in much)
    return f"Most of that is {most}.\nGive budget={forecast.peak}, or {', or '.join(dict.fromkeys(advice))}."


def _is_loss(ops: Iterable[Op]) -> bool:
    """Return True if the peak is at a loss, or in its results, that is not computed in parts already."""
    return any(name in op.fn for op in ops if not op.section for name in LOSSES)
