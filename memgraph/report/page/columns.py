"""A plan as columns, one entry an op, a lifetime, a copy or a decision.

Report   ->   {"ops": {"fn": [...], "tenths": [...]}, "lives": {"nbytes": [...], "first": [...]}, "copies": ..., ...}

Strings are places in one table. Times are tenths of a microsecond. The page sums the bytes of each kind from the
lifetimes; that the sum is the forecast's is tested.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from passes import KINDS, Forecast

from ..chrome_trace import QUEUES
from ..printout import decided, verdict
from ..report_data import ReportData
from .op_columns import durations, op_columns
from .packing import Strings, packed

Columns = dict[str, Any]


def columns(report: ReportData, strings: Strings) -> Columns:
    """Return everything that the page shows of one plan."""
    forecast = report.forecast
    return {
        **_figures(report),
        "ops": op_columns(forecast, strings),
        "lives": _lives(forecast),
        "copies": _copies(forecast),
        "captured": _captured(report),
        "decisions": _decisions(report, strings),
    }


def _figures(report: ReportData) -> Columns:
    """Return the numbers of the whole step."""
    first, *others = verdict(report).split("\n")
    choice, plain = report.choice, report.choice.captured
    return {
        "verdict": first,
        "others": others,
        "budget": report.budget,
        "peak": report.peak,
        "measured": report.measured,
        "us": report.forecast.us,
        "measured_us": report.measured_us,
        "as_it_is": {"us": plain.us, "peak": plain.peak},
        "bound_us": 0.0 if choice.greedy else choice.lower_bound,
        "gap": choice.gap,
        "decided_count": len(report.plan),
        "tier": report.machine.tier,
        "link": asdict(report.machine.link) if report.machine.link.works else None,
        "streams": {fn: report.machine.streaming.can_offload(fn) for fn in ("parameter", "gradient", "state")},
        "staging": report.forecast.staging,
    }


def _lives(forecast: Forecast) -> Columns:
    lives, index = forecast.lifetimes, forecast.trace.index
    return {
        "count": len(lives),
        "nbytes": packed(life.nbytes for life in lives),
        "first": packed(life.first for life in lives),
        "length": packed(life.last - life.first for life in lives),
        "kind": packed(KINDS.index(life.kind) for life in lives),
        "maker": packed(index[life.producer] for life in lives),
    }


def _copies(forecast: Forecast) -> Columns:
    copies, index = forecast.copies, forecast.trace.index
    return {
        "count": len(copies),
        "op": packed(index[copy.value] for copy in copies),
        "queue": packed(QUEUES.index(copy.queue) for copy in copies),
        "begin": packed(round(copy.begin * 10) for copy in copies),
        "tenths": packed(round(copy.end * 10) - round(copy.begin * 10) for copy in copies),
    }


def _captured(report: ReportData) -> Columns:
    """Return the step without decisions, and the place of each of its ops in the step that runs."""
    plain, index = report.choice.captured, report.forecast.trace.index
    return {
        "count": len(plain.trace.ops),
        "total": packed(plain.total),
        "tenths": durations(plain),
        "place": packed(_places([index.get(op.name, -1) for op in plain.trace.ops])),
    }


def _places(found: Sequence[int]) -> Iterable[int]:
    """Return rising places: an op that is compiled into a segment stands where the op before it does."""
    last = 0
    for place in found:
        last = max(last, place)
        yield last


def _decisions(report: ReportData, strings: Strings) -> Columns:
    """Return a row for each decided value, with the op that made its bytes."""
    trace, index = report.choice.captured.trace, report.forecast.trace.index
    maker = {made.name: op.name for op in trace.ops for made in op.makes}
    rows = list(decided(report))
    ops = [trace.op[value] for value, _ in rows]
    return {
        "count": len(rows),
        "value": strings.column(value for value, _ in rows),
        "op": packed(index.get(maker[op.holds[0]] if op.holds else op.name, -1) for op in ops),
        "verb": strings.column(row.verb for _, row in rows),
        "fn": strings.column(op.fn for op in ops),
        "where": strings.column(op.where for op in ops),
        "nbytes": packed(row.nbytes for _, row in rows),
        "tenths": packed(round(row.us * 10) for _, row in rows),
        "again": packed(-1 if op.once or op.is_input else round(op.us * 10) for op in ops),
        "why": strings.column(row.why for _, row in rows),
    }
