"""A plan that was made at the prices that ops have in segments runs them in segments."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

import memgraph
from memgraph.graph.inductor import Segment
from memgraph.graph.rewrite import rewrite
from memgraph.planning.lowering.lowering import Lowering
from memgraph.profile.op_profiler import OpProfiler
from passes import Machine, make_plan, predict
from passes.segments import Price
from passes.segments import Segment as Stretch
from tests.support.law_models import subject, traced

LARGE = Machine(1 << 40)


def test_what_makes_ops_cheap_in_the_plan_is_faster_than_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def price(lowering: Lowering, segment: Stretch, prober: OpProfiler) -> Price:
        return Price(0.01)

    monkeypatch.setattr(Lowering, "_price", price)
    monkeypatch.setattr("memgraph.graph.inductor.compile_segment", lambda part: Segment("none", lambda given: ()))
    graph, prober = subject("attention").graphs[False], OpProfiler(1 << 30)
    priced = Lowering(graph, traced("attention", False), prober).shared()
    choice = make_plan(priced, Machine(predict(priced, LARGE).peak * 8 // 10))
    assert choice.plan
    planned = rewrite(graph, choice.forecast.trace)
    lowering = Lowering(planned, choice.forecast.trace, prober)
    _, text = lowering.lowered(LARGE)
    assert len(lowering.segments) > 5
    assert lowering.chosen == lowering.segments
    assert predict(lowering.trace, LARGE).us > predict(text, LARGE).us


def test_the_report_says_that_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def dear(lowering: Lowering, segment: Stretch, prober: OpProfiler) -> Price:
        return Price(1e9)

    monkeypatch.setattr(Lowering, "_price", dear)
    monkeypatch.setattr("memgraph.graph.inductor.compile_segment", lambda part: Segment("none", lambda given: ()))
    model = nn.Sequential(nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8))
    report = memgraph.plan(model, torch.ones(4, 8), budget="1GB", lower="inductor")
    assert "nothing is compiled, as no segment is faster than its ops and within the budget" in str(report)
    assert "compiled" not in str(memgraph.plan(model, torch.ones(4, 8), budget="1GB", lower=None))


def test_a_segment_is_described_by_its_ops() -> None:
    part = fx.Graph()
    x = part.placeholder("x")
    part.output(
        (part.call_function(torch.ops.aten.gelu.default, (part.call_function(torch.ops.aten.sin.default, (x,)),)),)
    )
    segment = Segment("none", lambda given: (), part)
    assert segment.description == "a segment of 2 ops from aten.sin.default to aten.gelu.default"
