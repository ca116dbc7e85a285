"""The file of a report: its saved plan, with what was measured.

write_report(report)   ->   SavedPlan(..., facts={"measured": 649216392, "measured_us": 7090512.0, ...})
read_report(saved)     ->   the fields of a Report with the same plan, forecast and measurements
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, astuple, fields, replace
from typing import Any

from passes import BrokenTrace, Forecast, parse, predict
from passes.simulate.plan_result import LeastTimes
from passes.slices.whole_weight import WholeWeight

from ..errors import PlanError
from .report_data import Assumption, OpaqueRow, ReportData, RowBlocks
from .saved_plan import REPLAN, TYPES, SavedPlan, carried_out, record_plan, typed

ROWS: dict[str, Callable[..., Any]] = {
    "assumptions": Assumption, "opaque": OpaqueRow, "row_blocks": RowBlocks, "whole_weights": WholeWeight
}  # fmt: skip

SEARCHED = ("greedy", "interrupted")  # facts of the search


def write_report(report: ReportData) -> SavedPlan:
    """Return the plan with its measurements, in the form that is saved."""
    facts = {
        field.name: getattr(report, field.name)
        for field in fields(ReportData)
        if str(field.type) in TYPES and getattr(report, field.name) != field.default
    }
    facts |= {name: list(map(asdict, rows)) for name in ROWS if (rows := getattr(report, name))}
    if values := [each for each in facts.pop("assumptions", ()) if each["kind"] == "value"]:
        facts["assumptions"] = values
    if report.lowered is not None:
        facts["lowered"] = str(report.lowered.trace).split("\n")
    facts |= {name: True for name in SEARCHED if getattr(report.choice, name)}
    if report.choice.others is not None:
        facts["others"] = list(map(str, astuple(report.choice.others)))  # as text, since a bound may be infinite
    return record_plan(report.choice, report.machine, report.slices, facts)


def read_report(saved: SavedPlan) -> dict[str, Any]:
    """Return the fields of the report that was saved; forecasts are computed from the step and the plan.

    Raises:
        PlanError: the plan can't be carried out on its step, or a fact is not of its field's type.
    """
    try:
        facts, machine = dict(saved.facts), saved.machine
        lowered = facts.pop("lowered", None)
        searched = {name: facts.pop(name, False) is True for name in SEARCHED}
        others = LeastTimes(*map(float, facts.pop("others"))) if "others" in facts else None
        choice = replace(
            carried_out(saved), greedy=searched["greedy"], interrupted=searched["interrupted"], others=others
        )
        rows = {name: tuple(make(**row) for row in facts.pop(name)) for name, make in ROWS.items() if name in facts}
        compiled: Forecast | None = lowered and predict(parse("\n".join(lowered)), machine)
        known = {"machine": machine, "choice": choice, "slices": saved.slices, "lowered": compiled}
        return {**known, **rows, **typed(ReportData, facts)}
    except (AttributeError, BrokenTrace, KeyError, TypeError, ValueError) as error:
        raise PlanError(f"the saved plan can't be shown: {type(error).__name__}: {error}; {REPLAN}") from error
