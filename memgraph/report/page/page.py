"""A report as one HTML file, which opens without a network.

page(report)   ->   "<!doctype html> ... <script type="application/json" id="data">{"plans": [...]}</script> ..."

The file holds its data, its styles and its scripts. A policy in its head forbids everything else: the browser runs the
script and the style whose digests are listed, and makes no request. Names of modules and ops are data: they reach the
page as text, never as HTML.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Any

from passes import KINDS

from ..budget_curve import Sweep
from ..chrome_trace import QUEUES
from ..given_reports import require_report
from ..printout import printout, verdict
from ..report_data import ReportData
from ..tables import printed
from .budgets import budgets
from .columns import columns
from .packing import Strings

FOLDER = Path(__file__).parent
SCRIPTS = ("columns", "text", "curves", "memory", "queues", "buffers", "tables", "budgets", "head", "events", "page")
FORMAT = 1  # of the data


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
