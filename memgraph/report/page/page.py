"""A report as one HTML file, which opens without a network.

page(report)   ->   "<!doctype html> ... <script type="application/json" id="data">{"plans": [...]}</script> ..."

The file holds its data, its styles and its scripts. A policy in its head forbids everything else: the browser runs the
script and the style whose digests are listed, and makes no request. Names of modules and ops are data: they reach the
page as text, never as HTML.

The budgets between which the slider of a page moves, and the plans that it shows for them.

budgets(report, sweep)   ->   [{"budget": 500e6, "plan": 1}, {"budget": 649e6, "plan": 0}], [report, ...]

A `Sweep` has figures for each budget, and no plans: then the slider moves the figures only.

A plan as columns, one entry an op, a lifetime, a copy or a decision.

Report   ->   {"ops": {"fn": [...], "tenths": [...]}, "lives": {"nbytes": [...], "first": [...]}, "copies": ..., ...}

Strings are places in one table. Times are tenths of a microsecond. The page sums the bytes of each kind from the
lifetimes; that the sum is the forecast's is tested.

The ops of a plan as columns: names, places, prices.

add_1, add_2, add_2__out   ->   stems "add_", "add_", "__out"; numbers one up; the last belongs to the op before it

Pack columns of integers as short JSON, and strings into one table.

[7, 7, 7, 9]    ->   ["r", [7, 3, 9, 1]]            runs: value, count, ...
[0, 5, 10, 20]  ->   ["sr", [0, 1, 5, 2, 10, 1]]    runs of the differences; "s" says that they are summed
[512, 8, 512]   ->   ["t", [512, 8], [0, 1, 0]]     places in a table of the distinct values
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import groupby, pairwise
from pathlib import Path
from string import Template
from typing import Any

from passes import KINDS, Forecast, Op, Trace
from passes.ir.ops import is_runtime, value_of
from passes.ir.trace import PHASES

from ..budget_curve import Point, Sweep, point_of_plan
from ..chrome_trace import QUEUES
from ..given_reports import require_report
from ..peak_sentence import peak_sentence
from ..printout import decided, printout, verdict
from ..report_data import ReportData
from ..tables import printed

FOLDER = Path(__file__).parent
SCRIPTS = (
    "columns", "text", "curves", "memory", "queues", "buffers", "lives", "tables", "budgets", "head", "events", "page",
)  # fmt: skip
FORMAT = 1  # of the data
Columns = dict[str, Any]
Column = list[Any]


def page(
    report: ReportData, sweep: Sweep | Sequence[ReportData] | None = None, beside: ReportData | None = None
) -> str:
    """Return the page of a report.

    Args:
        sweep: the budgets that its slider moves between; with reports it shows their plans too.
        beside: another plan, whose curve and decisions are compared with those of the first.

    Raises:
        TypeError: `sweep` or `beside` is of another type.
    """
    if beside is not None:
        require_report("beside", beside)
    script, style = _script(), _style()
    policy = f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(style)}; base-uri 'none'"
    parts = {
        "policy": f"{policy}; form-action 'none'",
        "verdict": html.escape(verdict(report).split("\n")[0]),
        "text": html.escape(printed(printout(report))),
        "licence": html.escape(_read("uplot/LICENSE")),
        "data": _inert(_data(report, sweep, beside)),
        "script": script,
        "style": style,
    }
    return Template(_read("page.html")).substitute(parts)


def _data(report: ReportData, sweep: Sweep | Sequence[ReportData] | None, beside: ReportData | None) -> dict[str, Any]:
    """Return what the page draws, as JSON columns."""
    strings, (stops, plans) = Strings(), budgets(report, sweep)
    shown = [*plans, *([] if beside is None else [beside])]
    return {
        "memgraph_page": FORMAT,
        "kinds": KINDS,
        "queues": QUEUES,
        "plans": [columns(each, strings) for each in shown],
        "beside": None if beside is None else len(shown) - 1,
        "stops": stops,
        "strings": strings.table,  # the last: `columns` fills it
    }


def _inert(data: dict[str, Any]) -> str:
    """Return JSON in which no tag can begin or end, and no line that a script would see as broken."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _script() -> str:
    """Return uPlot and the scripts of the page in a scope of their own."""
    own = "\n".join(_read(f"script/{name}.js") for name in SCRIPTS)
    return f'{_read("uplot/uPlot.iife.min.js")}\n(() => {{\n"use strict";\n{own}}})();\n'


def _style() -> str:
    return _read("uplot/uPlot.min.css") + "\n" + _read("page.css")


def _digest(text: str) -> str:
    """Return the digest by which a policy allows an inline script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


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
        "peak_is": peak_sentence(report.forecast),
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


def op_columns(forecast: Forecast, strings: Strings) -> dict[str, Any]:
    """Return names, places and prices. The name of an op that a plan adds is that of its value and a suffix."""
    trace, ops = forecast.trace, forecast.trace.ops
    of = [_original(trace, index) for index in range(len(ops))]
    parts = [_parts(op, ops[own], own == index) for index, (op, own) in enumerate(zip(ops, of, strict=True))]
    last: dict[str, int] = {}
    counts = []
    for stem, number in parts:  # numbers of one stem mostly go up by one
        counts.append(number - last.get(stem, -1))
        last[stem] = number
    return {
        "count": len(ops),
        "of": packed(index - own for index, own in enumerate(of)),
        "stem": strings.column(stem for stem, _ in parts),
        "number": packed(counts),
        "fn": strings.column(op.fn for op in ops),
        "type": strings.column(op.type for op in ops),
        "where": strings.column(op.where for op in ops),
        "phase": packed(PHASES.index(op.phase) for op in ops),
        "again": packed(bool(op.recomputes) for op in ops),
        "once": packed(op.once or op.is_input for op in ops),
        "tenths": durations(forecast),
        "workspace": packed(forecast.by_kind["workspace"]),
    }


def _original(trace: Trace, index: int) -> int:
    """Return the index of the op whose value this op recomputes, copies or waits for; else its own."""
    op = trace.ops[index]
    value = op.recomputes or (value_of(op.name) if is_runtime(op.fn) else op.name)
    return trace.index.get(value, index) if op.name.startswith(value) else index


def _parts(op: Op, own: Op, is_own: bool) -> tuple[str, int]:
    """Return the stem and the number of a name; -1 without a number. Of an added op, the suffix."""
    if not is_own:
        return op.name.removeprefix(own.name), -1
    match = re.fullmatch(r"(.*?)(0|[1-9]\d{0,8})", op.name)
    return (match[1], int(match[2])) if match else (op.name, -1)


def durations(forecast: Forecast) -> Column:
    """Return the time from the begin of each op to that of the next, rounded so that no error adds up."""
    begins = [round(us * 10) for us in (*forecast.begins, forecast.us)]
    return packed(later - earlier for earlier, later in pairwise(begins))


def packed(values: Iterable[int]) -> Column:
    """Return the shortest of the forms in which the page reads a column."""
    column = [int(value) for value in values]
    steps = [later - earlier for earlier, later in pairwise([0, *column])]
    forms = [form for mark, ints in (("", column), ("s", steps)) for form in _forms(mark, ints)]
    return min(forms, key=lambda form: len(json.dumps(form, separators=(",", ":"))))


class Strings:
    """A table of strings, in which each stands once.  The first is empty."""

    def __init__(self) -> None:
        self.place: dict[str, int] = {"": 0}

    def add(self, text: str) -> int:
        """Return the place of a string in the table."""
        return self.place.setdefault(text, len(self.place))

    def column(self, texts: Iterable[str]) -> Column:
        """Return the places of strings as a column."""
        return packed(map(self.add, texts))

    @property
    def table(self) -> list[str]:
        return list(self.place)


def _forms(mark: str, ints: Sequence[int]) -> list[Column]:
    """Return integers as they are, as runs, and as places in a table; `mark` says what they are."""
    runs = [number for value, run in groupby(ints) for number in (value, sum(1 for _ in run))]
    forms: list[Column] = [[mark, list(ints)], [f"{mark}r", runs]]
    distinct = [value for value, _ in Counter(ints).most_common()]  # the most frequent gets the shortest place
    if len(distinct) * 2 < len(ints):
        place = {value: i for i, value in enumerate(distinct)}
        forms.append([f"{mark}t", distinct, [place[value] for value in ints]])
    return forms
