"""A browser reads from the columns what the forecast says."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from memgraph.report.page.page import FOLDER, Strings, columns, packed
from memgraph.report.report import Report
from passes import KINDS, predict
from tests.support.long_steps import long_report

READ = (FOLDER / "script/columns.js").read_text()


@pytest.fixture
def blank(chromium: Any) -> Any:
    return chromium.new_page()


def unpacked_in(page: Any, report: Report, what: str) -> Any:
    """Evaluate an expression about `plan`, as the page has it."""
    strings = Strings()
    plan = columns(report, strings)
    data = json.dumps({"kinds": KINDS, "plans": [plan], "strings": strings.table})
    return page.evaluate(f"() => {{ {READ}; const plan = planOf({data}, 0); return {what}; }}")


def test_every_form_of_a_column_is_read_as_it_was(blank: Any) -> None:
    draw = random.Random(0)
    kinds = [range(2), range(-3, 4), (0, 1 << 40), range(1 << 20)]
    lists = [[draw.choice(kind) for _ in range(size)] for kind in kinds for size in (0, 1, 9, 80)]
    lists += [sorted(each) for each in lists] + [[5] * 50, list(range(50))]
    forms = {packed(each)[0] for each in lists}
    assert forms >= {"", "r", "t", "sr"}
    read = blank.evaluate(
        f"(all) => {{ {READ}; return all.map((each) => Array.from(ints(each))); }}", list(map(packed, lists))
    )
    assert read == lists


def test_the_bytes_of_each_kind_are_the_forecasts(blank: Any) -> None:
    report = long_report(9)
    found = unpacked_in(
        blank, report, "[plan.byKind.map((bytes) => Array.from(bytes)), Array.from(plan.total), plan.peakIndex]"
    )
    assert found[0] == [report.forecast.by_kind[kind].tolist() for kind in KINDS]
    assert found[1:] == [report.forecast.total.tolist(), report.forecast.peak_index]


def test_names_and_places_are_those_of_the_ops(blank: Any) -> None:
    ops = long_report(9).forecast.trace.ops
    found = unpacked_in(
        blank,
        long_report(9),
        "Array.from({length: plan.count}, (_, i) => [plan.name(i), plan.fn(i), plan.type(i), plan.where(i)])",
    )
    assert found == [[op.name, op.fn, op.type, op.where] for op in ops]


def test_times_are_off_by_no_more_than_they_are_rounded(blank: Any) -> None:
    report = long_report(40)
    begins = unpacked_in(blank, report, "Array.from(plan.begins)")
    assert begins == pytest.approx([*report.forecast.begins, report.forecast.us], abs=0.051)


def test_a_decision_stands_at_the_op_that_makes_the_bytes(blank: Any) -> None:
    found = unpacked_in(
        blank,
        long_report(9),
        "Array.from({length: plan.decisions.count}, (_, i) => { const row = plan.decision(i); return [row.verb, row.value, plan.name(row.op)]; })",
    )
    assert found == [
        [verb, f"{op}_{i}", f"{op}_{i}"]
        for i in range(6)
        if i % 3 < 2
        for verb, op in [(("recompute", "gelu"), ("offload", "mm"))[i % 3]]
    ]


@pytest.mark.long
def test_a_step_with_compiled_parts_is_shown_as_it_runs(blank: Any) -> None:
    report = long_report(9)
    ops = report.forecast.trace.ops
    inner = ("gelu_2", "gelu_5")  # values that only exist within a segment
    kept = tuple(
        replace(op, reads=tuple(each for each in op.reads if each not in inner)) for op in ops if op.name not in inner
    )
    lowered = predict(replace(report.forecast.trace, ops=kept), report.machine)
    found = unpacked_in(blank, replace(report, lowered=lowered), "[Array.from(plan.total), plan.captured.place.length]")
    assert found == [lowered.total.tolist(), len(report.choice.captured.trace.ops)]
