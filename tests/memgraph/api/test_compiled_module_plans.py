"""The reports of all kinds of calls, beside that of the latest training step."""

from __future__ import annotations

import pytest
import torch

import memgraph
from tests.support.models import batch, net


@pytest.mark.long
def test_all_kinds_of_calls_have_a_report_and_the_latest_is_last() -> None:
    model = memgraph.compile(net(), "1GB", time_limit=0)
    assert not model.plans
    model(batch()).sum().backward()
    made = model.plan
    model(batch()).sum().backward()
    added = model.plan
    with torch.no_grad():
        model(batch(rows=3))
    assert model.plan == added  # an evaluation does not change it
    evaluated = model.plans[-1]
    assert list(model.plans) == [made, added, evaluated]
    assert [any(op.fn == "gradient" for op in report.forecast.trace.ops) for report in model.plans] == [
        False,
        True,
        False,
    ]
    model.zero_grad()
    model(batch())
    assert len(model.plans) == 3 and model.plans[-1] is model.plan


def test_before_the_first_training_step_the_plan_is_that_of_the_latest_call() -> None:
    model = memgraph.compile(net(), "1GB", time_limit=0)
    with torch.no_grad():
        model(batch(rows=3))
    evaluated = model.plan
    assert evaluated is model.plans[-1]
    model(batch()).sum().backward()
    assert model.plan is not evaluated and model.plan is model.plans[-1]
