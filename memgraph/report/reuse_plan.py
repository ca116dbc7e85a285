"""Whether a saved plan is good for a step, and what the step comes to with it.

    reused(plans, trace, machine)   ->   a Choice, without a search; or a PlanError that says why not

It is good for a step with the same ops, types, bytes and views, for the same torch and kind of device, whatever the ops
take now: what it comes to is forecast anew, and has to fit the budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from passes import BrokenTrace, Forecast, Machine, Offload, Op, PlanResult, Stream, Trace, apply, check, predict
from passes.ir.liveness import released
from passes.order.microbatch_order import reslice_microbatches

from ..errors import PlanError
from .saved_plan import ANEW, SavedPlan, with_saved_prices, without_prices


def reuse_plan(plans: Sequence[SavedPlan], trace: Trace, machine: Machine) -> PlanResult:
    """The one of `plans` that was made for this step, forecast anew; no decisions at all, if the step fits as it is.

    Raises:
        PlanError: none was, or it can't be carried out here, or is over the budget.
    """
    both = [(step, without_prices(step)) for step in (trace, released(trace))]
    matching = (
        (plan, step) for plan in plans for step, bare in both if plan.step == reslice_microbatches(bare, plan.step)
    )
    plan, trace = next(matching, (plans[0], trace))
    trace = reslice_microbatches(trace, plan.step)
    _refuse_others(plan, trace, machine)
    captured = predict(trace, machine)
    if captured.peak <= machine.budget:
        return PlanResult((), captured, captured)
    forecast = _carried_out(plan, trace, machine)
    if forecast.peak > machine.budget:
        raise PlanError(
            f"the saved plan needs {forecast.peak} bytes, over the budget of {machine.budget}: "
            f"give budget={forecast.peak}, or {ANEW}"
        )
    proves = machine.budget <= plan.machine.budget and plan.prices == with_saved_prices(trace, machine)
    return PlanResult(plan.plan, captured, forecast, plan.bound_us * proves, plan.any_us * proves)


def _refuse_others(plan: SavedPlan, trace: Trace, machine: Machine) -> None:
    """Raise a PlanError if the plan is for another torch, another device or another step."""
    if plan.torch != str(torch.__version__):
        raise PlanError(f"the saved plan is for torch {plan.torch}, this is {torch.__version__}; {ANEW}")
    there, here = (known.device.partition(":")[0] for known in (plan.machine, machine))
    if there != here:
        raise PlanError(f"the saved plan is for {there}, and the model is on {here}; {ANEW}")
    if found := _difference(plan.step, trace):
        raise PlanError(f"the saved plan is for {found}\n{ANEW}")


def _carried_out(plan: SavedPlan, trace: Trace, machine: Machine) -> Forecast:
    if any(isinstance(decision, Offload) for decision in plan.plan) and not machine.link.works:
        raise PlanError(f"the saved plan sends values to {plan.machine.tier}, which offload=None forbids; {ANEW}")
    for wire in {decision.wire for decision in plan.plan if isinstance(decision, Offload)} - {"", machine.cast.dtype}:
        raise PlanError(f"the saved plan rounds values to {wire} on their way, for which wire_dtype= asks; {ANEW}")
    if (
        any(isinstance(decision, Stream) and decision.on for decision in plan.plan)
        and not machine.streaming.host_update_rate
    ):
        raise PlanError(f"the saved plan updates states on the host, for which host_update=True asks; {ANEW}")
    try:
        applied = apply(trace, plan.plan)
        check(applied)
        return predict(applied, machine)
    except (ValueError, KeyError, BrokenTrace) as error:
        raise PlanError(f"the saved plan can't be carried out on its step: {error}; {ANEW}") from error


def _difference(there: Trace, here: Trace) -> str:
    """Where two steps begin to differ, in words; nothing if they are the same."""
    for index, (old, new) in enumerate(zip(there.ops, without_prices(here).ops, strict=False)):
        if old != new:
            found = replace(new, where=here.ops[index].where)
            return f"{_whose(old, new)}; op {index} is the first that differs\nthere: {old}\nhere:  {found}"
    if len(there.ops) != len(here.ops):
        return f"another model: it has {len(there.ops)} ops, this one {len(here.ops)}, alike as far as both go"
    return "" if there.outputs == here.outputs else "another model: the ops are the same, but what it returns is not"


def _whose(old: Op, new: Op) -> str:
    """Whether two ops that differ are the model's, or the call's."""
    fns = {old.fn, new.fn}
    if fns == {"input"}:
        return "another shape" if old.name == new.name else "another call"
    if "state" in fns or "update" in (old.phase, new.phase):
        return "another optimizer"
    return "another call: gradients to add to" if "gradient" in fns else "another model"
