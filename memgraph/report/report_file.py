"""The file of a report: its saved plan, with what was measured.

write_report(report)   ->   SavedPlan(..., facts={"measured": 649216392, "measured_us": 7090512.0, ...})
read_report(saved)     ->   the fields of a Report with the same plan, forecast and measurements
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import MISSING, asdict, fields
from typing import Any

from passes import BrokenTrace, Forecast, PlanResult, Trace, apply, check, parse, predict

from ..errors import PlanError
from .report_data import Assumption, OpaqueRow, ReportData
from .saved_plan import REPLAN, SavedPlan, record_plan

TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "int | None": (int,),
    "float": (float, int),
    "float | None": (float, int),
    "bool": (bool,),
    "str": (str,),
}
ROWS: dict[str, Callable[..., Any]] = {"assumptions": Assumption, "opaque": OpaqueRow}


def write_report(report: ReportData) -> SavedPlan:
    """Return the plan with its measurements, in the form that is saved."""
    facts = {
        field.name: getattr(report, field.name)
        for field in fields(ReportData)
        if str(field.type) in TYPES and getattr(report, field.name) != field.default
    }
    facts |= {name: list(map(asdict, rows)) for name in ROWS if (rows := getattr(report, name))}
    if report.lowered is not None:
        facts["lowered"] = str(report.lowered.trace).split("\n")
    if report.choice.greedy:
        facts["greedy"] = True
    return record_plan(report.choice, report.machine, report.slices, facts)


def read_report(saved: SavedPlan) -> dict[str, Any]:
    """Return the fields of the report that was saved; forecasts are computed from the step and the plan.

    Raises:
        PlanError: the plan can't be carried out on its step, or a fact is not of its field's type.
    """
    try:
        facts, machine = dict(saved.facts), saved.machine
        lowered = facts.pop("lowered", None)
        forecasts = predict(saved.step, machine), predict(_carried_out(saved), machine)
        bounds = saved.bound_us, saved.any_us
        choice = PlanResult(saved.plan, *forecasts, *bounds, facts.pop("greedy", False) is True, saved.proofs)
        rows = {name: tuple(make(**row) for row in facts.pop(name)) for name, make in ROWS.items() if name in facts}
        compiled: Forecast | None = lowered and predict(parse("\n".join(lowered)), machine)
        known = {"machine": machine, "choice": choice, "slices": saved.slices, "lowered": compiled}
        return {**known, **rows, **_typed(facts)}
    except (AttributeError, BrokenTrace, KeyError, TypeError, ValueError) as error:
        raise PlanError(f"the saved plan can't be shown: {type(error).__name__}: {error}; {REPLAN}") from error


def _carried_out(saved: SavedPlan) -> Trace:
    if not saved.plan:
        return saved.step
    applied = apply(saved.step, saved.plan)
    check(applied)
    return applied


def _typed(facts: dict[str, Any]) -> dict[str, Any]:
    """Check that facts are fields of a report, of their types, and finite."""
    types = {each.name: TYPES[str(each.type)] for each in fields(ReportData) if str(each.type) in TYPES}
    defaults = {each.name: each.default for each in fields(ReportData) if each.default is not MISSING}
    for name, fact in facts.items():
        well = isinstance(fact, types[name]) and (types[name] == (bool,) or not isinstance(fact, bool))
        if not (well and (isinstance(fact, str) or math.isfinite(fact))) or name not in defaults:
            raise TypeError(f"{name} is {fact!r}")
    return facts
