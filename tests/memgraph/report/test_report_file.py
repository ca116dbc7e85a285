"""A report that is written is read back without its model: it prints the same, and trains from the same plan."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

import memgraph
from memgraph.report.report_data import Assumption, OpaqueRow
from passes import PlanResult, apply, parse_plan, predict
from tests.memgraph.report.test_golden_reports import DISK, TRAIN
from tests.support.models import batch, net

PLAN = """
    recompute h: before dv
"""


def planned(**facts: Any) -> memgraph.Report:
    plan = parse_plan(PLAN)
    captured, forecast = predict(TRAIN, DISK), predict(apply(TRAIN, plan), DISK)
    return memgraph.Report(DISK, PlanResult(plan, captured, forecast, bound_us=50.0), **facts)


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"measured": 29_000_000, "measured_us": 5200.0, "repriced_us": 5100.0},
        {"measured": 34_000_000, "beyond": "the loop held the outputs of 2 steps", "counted": False},
        {"unmeasured": "a profiler ran", "forwards": 2, "together": 31_000_000, "adding": 40_000_000},
        {"assumptions": (Assumption("x < 3", "net.py:4", 1),), "opaque": (OpaqueRow("a.b", "GRU", 8, "loops", 0),)},
        {"lowered": predict(apply(TRAIN, parse_plan(PLAN)), DISK), "apart_us": 6000.0, "uncompiled": 1},
        {"recent_us": 6000.0, "expected_us": 5100.0, "planned_us": 1e6, "recorded": "recorded as 2 graphs"},
    ],
)
def test_what_is_written_prints_the_same_when_it_is_read(facts: dict[str, Any]) -> None:
    report = planned(**facts)
    read = memgraph.Report.from_json(report.to_json())
    assert str(read) == str(report)
    assert read.to_json() == report.to_json()


def test_a_plan_of_an_interrupted_search_says_so_also_from_a_file() -> None:
    report = planned()
    cut = replace(report, choice=replace(report.choice, interrupted=True))
    assert "planning was interrupted" not in str(report)
    for told in (cut, memgraph.Report.from_json(cut.to_json())):
        assert "planning was interrupted: this is the best plan until then" in str(told)


@pytest.mark.long
def test_the_report_of_a_step_that_ran_is_read_without_its_model() -> None:
    room = memgraph.plan(net(), batch(), budget="1GB").peak
    model = memgraph.compile(net(), room - 50_000)
    for _ in range(3):
        model(batch()).sum().backward()
        model.zero_grad()
    text = model.plan.to_json()
    read = memgraph.Report.from_json(text)
    assert str(read) == str(model.plan)
    assert read.measured == model.plan.measured is not None
    again = memgraph.compile(net(), room - 50_000, plan=text)
    torch.manual_seed(0)
    again(batch()).sum().backward()
    assert again.plan.plan == model.plan.plan


@pytest.mark.parametrize(
    ("name", "fact"),
    [
        ("measured", "many"), ("measured", True), ("counted", 1), ("plan", 3),
        ("surprise", 1), ("assumptions", 7), ("assumptions", [{"text": "x"}]), ("lowered", ["nonsense"]),
    ],
)  # fmt: skip
def test_a_fact_that_no_report_has_is_refused(name: str, fact: Any) -> None:
    saved = memgraph.SavedPlan.from_json(planned().to_json())
    text = replace(saved, facts={name: fact}).to_json()
    with pytest.raises(memgraph.PlanError, match="can't be shown"):
        memgraph.Report.from_json(text)


def test_a_decision_that_cannot_be_carried_out_is_refused() -> None:
    saved = memgraph.SavedPlan.from_json(planned().to_json())
    text = replace(saved, plan=parse_plan("recompute nothing: before dv")).to_json()
    with pytest.raises(memgraph.PlanError, match="can't be shown"):
        memgraph.Report.from_json(text)


def test_the_file_has_a_version_and_no_pickle() -> None:
    facts = json.loads(planned().to_json())
    assert facts["memgraph"] == 5
    assert all(isinstance(line, str) for line in facts["step"] + facts["decisions"])


def test_names_of_modules_may_hold_any_end_of_line() -> None:
    model = torch.nn.Sequential()
    model.add_module("a\u2028b\x85c\x0b\x1cd", torch.nn.Linear(4, 4))
    report = memgraph.plan(model, torch.ones(2, 4), budget="1GB")
    assert str(memgraph.Report.from_json(report.to_json())) == str(report)
