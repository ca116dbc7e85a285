"""With lower="auto", ops that Inductor can't compile run op by op; this is logged once, and prices fit."""

from __future__ import annotations

import logging
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import memgraph
from memgraph.errors import LoweringError
from memgraph.graph import inductor
from memgraph.graph.inductor import Segment
from memgraph.graph.rewrite import rewrite
from memgraph.graph.summarize import summarize
from memgraph.planning import target
from memgraph.planning.lowering import lowering
from memgraph.planning.lowering.lowering import Lowering
from memgraph.profile import op_profiler
from memgraph.profile.op_profiler import OpProfiler
from passes import Machine, make_plan, predict
from passes.segments import Price
from tests.support.law_models import subject

LARGE = Machine(1 << 40)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).sigmoid() * 2
        return x.square().mean()


@pytest.fixture(autouse=True)
def _anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "_segments", {})
    monkeypatch.setattr(inductor, "_refused", set())
    monkeypatch.setattr(lowering, "_refused", {})


@pytest.fixture(name="broken")
def _broken(monkeypatch: pytest.MonkeyPatch) -> list[fx.Graph]:
    tried: list[fx.Graph] = []

    def compiled(part: fx.Graph) -> Segment:
        tried.append(part)
        raise LoweringError("no compiler at net.py:3")

    monkeypatch.setattr(inductor, "compile_segment", compiled)
    monkeypatch.setattr(target, "asks_to_lower", lambda option, device: True)
    return tried


def gradients(called: Any, model: nn.Module) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    called(torch.ones(4, 16)).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_what_cant_be_compiled_runs_as_it_is_after_one_warning(broken: list[fx.Graph]) -> None:
    model = Net()
    ours = memgraph.compile(model, "1GB")
    with pytest.warns(RuntimeWarning, match=r"runs op by op: no compiler at net\.py:3") as said:
        found = gradients(ours, model)
    assert len(said) == 1 and broken
    assert all(map(torch.equal, found, gradients(model, model)))
    count, tried = ours.plan.uncompiled, len(broken)
    assert count > 1 and f"faster than its ops and within the budget; {count} can't be" in str(ours.plan)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        memgraph.plan(Net(), torch.ones(4, 16), budget="1GB")
    assert len(broken) == tried  # what has failed is not tried again


@pytest.mark.usefixtures("broken")
def test_who_insists_gets_the_error() -> None:
    with pytest.raises(LoweringError, match="no compiler"):
        memgraph.plan(Net(), torch.ones(4, 16), budget="1GB", lower="inductor")


def test_a_word_comes_before_the_first_that_is_compiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def compiled(part: fx.Graph) -> Any:
        said.append(len(caplog.messages))
        return lambda *tensors: ()

    said: list[int] = []
    monkeypatch.setattr(inductor, "_compile", compiled)
    with caplog.at_level(logging.WARNING, "memgraph"):
        for _ in range(2):
            memgraph.plan(Net(), torch.ones(4, 16), budget="1GB", lower="inductor")
    assert set(said) == {1} and len(caplog.messages) == 1
    assert "kernels with Inductor" in caplog.text and "lower=None" in caplog.text


def test_what_is_in_no_segment_is_stated_at_its_own_price(monkeypatch: pytest.MonkeyPatch) -> None:
    def price(lowering: Lowering, segment: Any, prober: OpProfiler) -> Price:
        return Price(0.01)

    monkeypatch.setattr(Lowering, "_price", price)
    monkeypatch.setattr(inductor, "compile_segment", lambda part: Segment("none", lambda given: ()))
    graph, prober = subject("attention").graphs[False], OpProfiler(1 << 30)
    alone = summarize(graph, prober)
    cheap = Lowering(graph, alone, prober).shared()
    machine = Machine(predict(cheap, LARGE).peak * 8 // 10)
    choice = make_plan(cheap, machine)
    planned = rewrite(graph, choice.forecast.trace)
    lowering = Lowering(planned, choice.forecast.trace, prober)
    lowering.lowered(replace(machine, budget=1))  # none is within that
    assert not lowering.chosen
    stated = lowering.restated(choice, machine)
    assert stated.captured.us == pytest.approx(predict(alone, machine).us)
    assert stated.forecast.us == pytest.approx(predict(lowering.trace, machine).us)
    assert stated.captured.us > choice.captured.us and stated.forecast.peak == choice.forecast.peak
    assert stated.lower_bound <= stated.forecast.us and stated.gap <= stated.overhead


def test_what_tuning_takes_is_none_of_a_segments_workspace_and_no_step_tunes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, a kernel of Inductor's is tuned in its first run of a process, with memory that it takes once."""
    runs: list[int] = []

    def run(given: list[Tensor]) -> tuple[Tensor]:
        runs.append(0)
        if len(runs) == 1:
            torch.empty(1 << 20, dtype=torch.uint8).fill_(0)
        return (given.pop().neg(),)

    graph = fx.Graph()
    node = graph.create_node("call_function", Segment("tuned", run), (graph.placeholder("x"),))
    for each in graph.nodes:
        each.meta["val"] = torch.empty(1000)
    node.meta["val"] = (torch.empty(1000),)
    cost = OpProfiler(1 << 30)(node)
    assert cost.workspace == 0 and len(runs) > 2
    monkeypatch.setattr(op_profiler, "_known", {})  # as in a process that begins again
    runs.clear()
    assert OpProfiler(1 << 30)(node).workspace == 0 and len(runs) > 2
