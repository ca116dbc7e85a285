"""The budgets between which the slider of a page moves, and the plans that it shows for them.

budgets(report, sweep)   ->   [{"budget": 500e6, "plan": 1}, {"budget": 649e6, "plan": 0}], [report, ...]

A `Sweep` has figures for each budget, and no plans: then the slider moves the figures only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..budget_curve import Point, Sweep, point_of_plan
from ..report_data import ReportData


def budgets(
    report: ReportData, sweep: Sweep | Sequence[ReportData] | None
) -> tuple[list[dict[str, Any]], list[ReportData]]:
    """Return the stops of the slider, the smallest budget first, and the plans that they number.

    Raises:
        TypeError: `sweep` is neither a Sweep nor reports.
    """
    own = _stop(point_of_plan(report.budget, report.choice), 0)
    if sweep is None:
        return [], [report]
    if isinstance(sweep, Sweep):
        stops = [_stop(point, None) for point in sweep.points if point.budget != report.budget]
        return _sorted([own, *stops]), [report]
    plans = [report, *(each for each in _reports(sweep) if each is not report)]
    return _sorted(_stop(point_of_plan(each.budget, each.choice), i) for i, each in enumerate(plans)), plans


def _reports(sweep: object) -> list[ReportData]:
    reports: list[ReportData] = []
    for each in sweep if isinstance(sweep, Iterable) else [sweep]:
        if not isinstance(each, ReportData):
            raise TypeError(f"sweep {_found(sweep, each)}; give what memgraph.sweep returned, or a list of reports")
        reports.append(each)
    return reports


def _found(sweep: object, other: object) -> str:
    kind = type(sweep).__name__
    return f"is a {kind}" if other is sweep or isinstance(sweep, str) else f"is a {kind} with a {type(other).__name__}"


def _stop(point: Point, plan: int | None) -> dict[str, Any]:
    return {**point.facts, "plan": plan}


def _sorted(stops: Any) -> list[dict[str, Any]]:
    return sorted(stops, key=lambda stop: stop["budget"])
