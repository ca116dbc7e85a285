"""A report in a notebook: its picture loses no peak, names are text, and a repr is short."""

from __future__ import annotations

import io
import re
import sys
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given

from memgraph.planning import progress
from memgraph.report.notebook import HEIGHT, notebook_html, picture
from memgraph.report.report import Report
from memgraph.report.tables import mb
from passes import Machine, PlanResult, Trace, make_plan, parse, predict
from tests.support.strategies import machines, traces

NAMED = parse("""
    forward:
    x = input()  # f32[100, 1000] | makes x:400000 | at input_0
    d = tangent()  # f32[] | makes d:4
    a = aten.gelu.default(x)  # f32[100, 1000] | makes a:400000 | 900.0 us | at <b>bold</b>&co net.py:7
    loss = aten.sum.default(a)  # f32[] | makes loss:4 | 10.0 us | at net.py:9
    backward:
    g = aten.expand.default(d)  # f32[100, 1000] | makes g:400000 | 10.0 us | at net.py:9
    dx = aten.gelu_backward.default(g, x)  # f32[100, 1000] | makes dx:400000 | 900.0 us | at <script>alert(1)</script>
    return output loss, gradient dx
""")


def as_it_is(trace: Trace, machine: Machine) -> Report:
    forecast = predict(trace, machine)
    return Report(machine, PlanResult((), forecast, forecast))


def points(svg: ElementTree.Element) -> list[tuple[float, float]]:
    corners = " ".join(each.attrib["points"] for each in svg.iter("polygon")).split()
    return [(float(x), float(y)) for x, y in (corner.split(",") for corner in corners)]


@given(traces(), machines())
def test_the_highest_corner_of_the_picture_is_the_peak(trace: Trace, machine: Machine) -> None:
    report = as_it_is(trace, machine)
    svg = ElementTree.fromstring(picture(report).partition("</svg>")[0] + "</svg>")
    corners, (circle,) = points(svg), svg.iter("circle")
    assert min(y for _, y in corners) == pytest.approx(float(circle.attrib["cy"]), abs=0.11)
    assert all(0 <= y <= HEIGHT for _, y in corners)
    assert mb(report.peak) in svg.attrib["aria-label"]


def test_names_are_text() -> None:
    shown = notebook_html(as_it_is(NAMED, Machine(4_000_000)))
    tree = ElementTree.fromstring(
        shown.replace("<br>", "<br/>").replace("&#9632;", "*")
    )  # whole, and nothing of a name is a tag
    assert {each.tag for each in tree.iter()} <= {
        "div", "b", "br", "svg", "polygon", "title", "line", "text", "circle", "span", "details", "summary", "pre"
    }  # fmt: skip
    assert "".join(tree.find("b").itertext()).startswith("fits: forecast")  # type: ignore[union-attr]
    assert "<script>alert(1)</script>" in "".join(tree.itertext())


@given(traces(), machines())
def test_a_repr_is_short_for_any_step(trace: Trace, machine: Machine) -> None:
    report = as_it_is(trace, machine)
    shown = report, report.choice, report.forecast, report.diff(report), report.forecast.trace
    assert [text for each in shown if len(text := repr(each)) > 400] == []


def test_a_report_is_printed_in_a_notebook_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """There rich shows what it prints below the cell, and writes it to no file."""
    report = as_it_is(NAMED, Machine(4_000_000))
    before = str(report)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert str(report) == before and "at the peak" in before


def test_progress_is_shown_below_a_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    kind: Any = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})
    stream = kind()
    monkeypatch.setattr(sys, "stderr", stream)
    progress.log_progress("pricing ops")
    assert re.fullmatch("memgraph: pricing ops\n", stream.getvalue())


def test_a_plan_is_drawn_with_its_decisions() -> None:
    machine = Machine(1_300_000)
    report = Report(machine, make_plan(NAMED, machine))
    assert f"{len(report.plan)} decisions" in notebook_html(report)
