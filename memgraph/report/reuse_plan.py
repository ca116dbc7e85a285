"""Apply a saved plan to a step in place of a search.

    reuse_plan(plans, trace, machine)   ->   PlanResult, or a PlanError with the reason

A saved plan is valid for a step with the same ops, types, bytes and views, on the same torch and kind of device. The
times of ops may differ: the plan is forecast with those of now, and has to fit the budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from passes import (
    NO_PROOFS,
    BrokenTrace,
    Forecast,
    Machine,
    Offload,
    Op,
    PlanResult,
    Stream,
    Trace,
    apply,
    check,
    predict,
)
from passes.ir.liveness import released
from passes.order.microbatch_order import order_like

from ..errors import PlanError
from .saved_plan import REPLAN, SavedPlan, torch_version, with_saved_prices, without_prices


def reuse_plan(plans: Sequence[SavedPlan], trace: Trace, machine: Machine) -> PlanResult:
    """Return the forecast of the first of `plans` that was made for this step; without decisions if the step fits.

    Raises:
        PlanError: no plan matches, or the one that does can't be carried out here or exceeds the budget.
    """
    both = [(step, without_prices(step)) for step in (trace, released(trace))]
    matching = (
        (plan, step) for plan in plans for step, bare in both if plan.bare_step == order_like(bare, plan.bare_step)
    )
    plan, trace = next(matching, (plans[0], trace))
    trace = order_like(trace, plan.bare_step)
    _refuse_others(plan, trace, machine)
    captured = predict(trace, machine)
    if captured.peak <= machine.budget:
        return PlanResult((), captured, captured)
    forecast = _carried_out(plan, trace, machine)
    if forecast.peak > machine.budget:
        raise PlanError(
            f"the saved plan needs {forecast.peak} bytes, over the budget of {machine.budget}: "
            f"give budget={forecast.peak}, or {REPLAN}"
        )
    proves = machine.budget <= plan.machine.budget and plan.prices == with_saved_prices(trace, machine)
    if not proves:
        return PlanResult(plan.plan, captured, forecast)
    # What is proven for a larger budget holds for this one, but its dual values are of another program.
    proofs = plan.proofs if machine.budget == plan.machine.budget else NO_PROOFS
    return PlanResult(plan.plan, captured, forecast, plan.bound_us, plan.any_us, proofs=proofs)


def _refuse_others(plan: SavedPlan, trace: Trace, machine: Machine) -> None:
    """Raise a PlanError if the plan is for another torch, another device or another step."""
    if plan.torch != (here := torch_version()):
        raise PlanError(f"the saved plan is for torch {plan.torch}, this is {here}; {REPLAN}")
    there, here = (known.device.partition(":")[0] for known in (plan.machine, machine))
    if there != here:
        raise PlanError(f"the saved plan is for {there}, and the model is on {here}; {REPLAN}")
    if found := _difference(plan.bare_step, trace):
        raise PlanError(f"the saved plan is for {found}\n{REPLAN}")


def _carried_out(plan: SavedPlan, trace: Trace, machine: Machine) -> Forecast:
    if any(isinstance(decision, Offload) for decision in plan.plan) and not machine.link.works:
        raise PlanError(f"the saved plan offloads to {plan.machine.tier}, which offload=None forbids; {REPLAN}")
    here = {tier.name for tier in machine.behind}
    for to in {each.to for each in plan.plan if isinstance(each, Offload | Stream)} - here - {""}:
        raise PlanError(f"the saved plan offloads to {to} behind {plan.machine.tier}, which needs host=; {REPLAN}")
    for wire in {decision.wire for decision in plan.plan if isinstance(decision, Offload)} - {"", machine.cast.dtype}:
        raise PlanError(f"the saved plan rounds offloaded values to {wire}, which needs wire_dtype=; {REPLAN}")
    on_host = any(isinstance(decision, Stream) and decision.on for decision in plan.plan)
    if on_host and not machine.streaming.host_update_rate:
        raise PlanError(f"the saved plan updates states on the host, which needs host_update=True; {REPLAN}")
    try:
        applied = apply(trace, plan.plan)
        check(applied)
        return predict(applied, machine)
    except (ValueError, KeyError, BrokenTrace) as error:
        raise PlanError(f"the saved plan can't be carried out on its step: {error}; {REPLAN}") from error


def _difference(there: Trace, here: Trace) -> str:
    """Describe the first difference of two steps; empty if they are the same."""
    trains, called = (any(op.phase == "backward" for op in step.ops) for step in (there, here))
    if trains != called:
        words = ("a step with backward", "none") if trains else ("a call without backward", "one")
        return f"{words[0]}, and this call has {words[1]}"
    for index, (old, new) in enumerate(zip(there.ops, without_prices(here).ops, strict=False)):
        if old != new:
            found = replace(new, where=here.ops[index].where)
            return f"{_what_differs(old, new)}; op {index} is the first that differs\nthere: {old}\nhere:  {found}"
    if len(there.ops) != len(here.ops):
        return f"another model: it has {len(there.ops)} ops, this one {len(here.ops)}, alike as far as both go"
    return "" if there.outputs == here.outputs else "another model: the ops are the same, but what it returns is not"


def _what_differs(old: Op, new: Op) -> str:
    """Name what differs, given the first pair of ops that do: the shape, the call, the optimizer or the model."""
    fns = {old.fn, new.fn}
    if fns == {"input"}:
        return "another shape" if old.name == new.name else "another call"
    if "state" in fns or "update" in (old.phase, new.phase):
        return "another optimizer"
    return "another call: gradients to add to" if "gradient" in fns else "another model"
