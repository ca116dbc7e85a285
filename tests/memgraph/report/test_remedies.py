"""A plan that costs much says what would make it cheaper; each line is the forecast of a plan that exists."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from expecttest import assert_expected_inline

from memgraph.report.remedies import remedies
from memgraph.report.report_data import ReportData
from passes import Cast, Link, Machine, PlanResult, apply, parse_plan, predict
from tests.memgraph.report.test_golden_reports import TRAIN

SLOW = Machine(33_000_000, tier="disk", link=Link(out=2_000.0, back=2_000.0))
OFFLOADED = """
    offload a: out h, free b
    reload a: back e, use da
"""


def planned(machine: Machine, decisions: str, **facts: Any) -> ReportData:
    plan = parse_plan(decisions)
    captured, forecast = predict(TRAIN, machine), predict(apply(TRAIN, plan), machine)
    return ReportData(machine, PlanResult(plan, captured, forecast), **facts)


def told(machine: Machine, decisions: str, **facts: Any) -> str:
    return "\n".join(remedies(planned(machine, decisions, **facts))) + "\n"


def test_copies_that_compute_waits_for_would_be_shorter_on_a_faster_disk_or_as_bf16() -> None:
    assert_expected_inline(
        told(SLOW, OFFLOADED),
        """\
spill_dir= on a disk twice as fast: 4.7 ms, +0.0%
wire_dtype=torch.bfloat16, without the time of its casts: 4.7 ms, +0.0%
""",
    )


def test_the_figure_of_a_faster_disk_is_the_forecast_of_the_same_plan_there() -> None:
    slower = replace(SLOW, link=Link(out=800.0, back=800.0))
    faster = replace(SLOW, link=Link(out=1600.0, back=1600.0))
    us = planned(faster, OFFLOADED).forecast.us
    assert f"spill_dir= on a disk twice as fast: {us / 1e3:.1f} ms" in told(slower, OFFLOADED)


def test_a_host_has_no_spill_dir_and_what_is_cast_is_not_cast_again() -> None:
    casting = replace(SLOW, cast=Cast("bf16", 1e5, 1e5))
    for machine, options in ((SLOW, 2), (replace(SLOW, tier="host"), 1), (casting, 1)):
        assert len(remedies(planned(machine, OFFLOADED))) == options
    assert "spill_dir" not in told(replace(SLOW, tier="host"), OFFLOADED)
    assert "wire_dtype" not in told(casting, OFFLOADED)


def test_a_plan_that_would_exceed_the_budget_is_not_named() -> None:
    assert "wire_dtype" not in told(replace(SLOW, budget=32_000_000), OFFLOADED)


def test_a_plan_that_costs_little_needs_no_advice() -> None:
    fast = replace(SLOW, link=Link(out=100_000.0, back=100_000.0))
    assert remedies(planned(fast, OFFLOADED)) == []
    assert remedies(planned(SLOW, "")) == []
