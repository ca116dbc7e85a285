"""Two plans are compared by what they decide of each value, folded over equal layers."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st

from memgraph.report.report import Report, changes
from passes import Plan, PlanResult, Recompute, Trace, apply, parse, parse_plan, predict
from tests.memgraph.report.test_golden_reports import DISK, TRAIN


def report(decisions: str = "", trace: Trace = TRAIN, **facts: Any) -> Report:
    plan = parse_plan(decisions)
    captured, forecast = predict(trace, DISK), predict(apply(trace, plan), DISK)
    return Report(DISK, PlanResult(plan, captured, forecast), **facts)


def test_a_difference_is_printed_by_decision() -> None:
    before = report("recompute h: before dv")
    after = report("offload h: out b, free b\nreload h: back g, use dv")
    assert_expected_inline(
        str(before.diff(after)) + "\n",
        """\
budget   33.0 MB -> 33.0 MB
forecast 32.8 MB -> 32.8 MB, 0 B
step     4.8 ms -> 5.3 ms, +11.0%

decided differently
before     after    op                 where               bytes
recompute  offload  aten.gelu.default  layers.0 net.py:7  3.2 MB
""",
    )


def test_equal_plans_differ_in_nothing() -> None:
    found = report("recompute h: before dv").diff(report("recompute h: before dv"))
    assert found.same_step and found.changes == ()
    assert "both decide the same" in str(found)


def test_steps_that_differ_are_compared_by_name() -> None:
    other = parse(str(TRAIN).replace("h = ", "k = ").replace("(h, ", "(k, ").replace("makes h", "makes k"))
    found = report("recompute h: before dv").diff(report("recompute k: before dv", other))
    assert not found.same_step
    assert {(change.before, change.after) for change in found.changes} == {
        ("recompute", "absent"),
        ("absent", "recompute"),
    }
    assert "the steps differ" in str(found)


VIEWED = parse("""
    forward:
    x = input()  # f32[1000] | makes x:4000
    d = tangent()  # f32[] | makes d:4
    a = aten.exp.default(x)  # f32[1000] | makes a:4000 | 10 us | at net.py:1
    v = aten.view.default(a)  # f32[10, 100] | holds a | at net.py:2
    loss = aten.sum.default(v)  # f32[] | makes loss:4 | 1 us
    backward:
    g = aten.mul.Tensor(v, d)  # f32[10, 100] | makes g:4000 | 10 us
    return output loss, gradient g
""")


def test_views_are_listed_with_the_bytes_that_are_copied_and_left_out_where_none_are() -> None:
    again = report("recompute a: before g\nrecompute v: before g", VIEWED)
    (change,) = report(trace=VIEWED).diff(again).changes
    assert (change.fn, change.nbytes, change.count) == ("aten.exp.default", 4000, 1)
    offloaded = report("offload v: out loss, free loss\nreload v: back g, use g", VIEWED)
    (change,) = report(trace=VIEWED).diff(offloaded).changes
    assert (change.before, change.after, change.nbytes) == ("keep", "offload", 4000)


def test_the_json_has_all_fields() -> None:
    found = report().diff(report("recompute h: before dv"))
    assert json.loads(found.to_json()) == json.loads(json.dumps(asdict(found)))


VALUES = [op.name for op in TRAIN.ops if op.makes and not op.is_input]
PLANS = st.lists(st.sampled_from(VALUES), unique=True).map(lambda names: tuple(Recompute(name, "dv") for name in names))


@given(PLANS, PLANS)
def test_there_and_back_are_mirrored_and_count_every_value_that_differs(before: Plan, after: Plan) -> None:
    there, back = changes((TRAIN, before), (TRAIN, after)), changes((TRAIN, after), (TRAIN, before))
    assert {(c.before, c.after, c.fn, c.nbytes) for c in there} == {(c.after, c.before, c.fn, c.nbytes) for c in back}
    differing = {each.value for each in before} ^ {each.value for each in after}
    assert sum(change.count for change in there) == len(differing)
    assert sum(change.nbytes for change in there) == sum(TRAIN.op[name].nbytes for name in differing)
