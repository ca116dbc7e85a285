"""Parts of a step compiled by Inductor: the text says what the graph is, the budget holds, gradients are eager's but for
rounding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memgraph
from memgraph.graph.rewrite import rewrite
from memgraph.graph.summarize import Cost, summarize
from memgraph.planning.lowering.lowering import Lowering
from memgraph.profile.op_profiler import OpProfiler
from passes import Machine, Trace, make_plan, predict
from tests.support.law_models import subject, traced
from tests.support.zoo import CASES, fresh


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.wide, self.back = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.back(nn.functional.silu(self.wide(self.norm(x))) * 0.5)


def net(layers: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(128) for _ in range(layers)))


def loss_of(y: Tensor) -> Tensor:
    return y.square().mean()


GPT = next(case for case in CASES if case.name == "gpt2")
BATCH = torch.randn(2048, 128, generator=torch.Generator().manual_seed(1))


def trained(model: nn.Module, call: Any, optimizer: torch.optim.Optimizer, steps: int = 4) -> list[Tensor]:
    for _ in range(steps):
        call().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def eager() -> list[Tensor]:
    model = net()
    return trained(model, lambda: loss_of(model(BATCH)), torch.optim.SGD(model.parameters(), lr=0.1))


def compiled(budget: int, **options: Any) -> tuple[list[Tensor], memgraph.Report]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = memgraph.compile(model, budget, optimizer=optimizer, loss=loss_of, **options)
    return trained(model, lambda: step(BATCH), optimizer), step.plan


@pytest.mark.long
@pytest.mark.parametrize("name", ["attention"])
def test_the_law_holds_of_segments(name: str) -> None:
    trace = traced(name, False)
    choice = make_plan(trace, Machine(predict(trace, Machine(1 << 40)).peak * 8 // 10))
    planned = rewrite(subject(name).graphs[False], choice.forecast.trace)
    lowering = Lowering(planned, choice.forecast.trace, OpProfiler(1 << 30))
    # Ops of this size are not faster in segments: it is said that they are, so that there are any.
    lowering.trace = dear(lowering.trace)
    graph, text = lowering.lowered(Machine(1 << 40))
    assert len(lowering.chosen) > 5
    priced = {op.name: Cost(op.us, op.workspace) for op in text.ops}
    assert str(summarize(graph, lambda node: priced[node.name])) == str(text)


def dear(trace: Trace) -> Trace:
    return replace(trace, ops=tuple(replace(op, us=op.us * 1e6) for op in trace.ops))


@pytest.mark.long
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_gradients_are_eagers_but_for_rounding_and_the_budget_holds(share: float) -> None:
    _, plain = compiled(1 << 34)
    budget = int(plain.peak * share) if share < 1 else 1 << 34
    parameters, report = compiled(budget, lower="inductor")
    assert "compiled: " in str(report)
    assert any(op.fn == "memgraph.segment" for op in report.forecast.trace.ops)
    assert report.measured is not None
    assert report.measured <= report.peak <= budget
    for ours, theirs in zip(parameters, eager(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.slow  # Inductor compiles for 20 s
def test_a_small_gpt_keeps_its_budget_and_its_loss() -> None:
    def losses(budget: int, lower: str | None) -> tuple[list[float], memgraph.Report | None]:
        model, batch = fresh(GPT)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        step = memgraph.compile(model, budget, optimizer=optimizer, lower=lower) if budget else model
        found = []
        for seed in range(3):
            torch.manual_seed(seed)
            found.append(GPT.loss(batch.of(step)))
            found[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        report = step.plan if isinstance(step, memgraph.CompiledModule) else None
        return [loss.item() for loss in found], report

    eager, _ = losses(0, None)
    bits, plain = losses(1 << 34, None)
    assert bits == eager
    assert plain is not None
    budget = plain.peak * 6 // 10
    near, report = losses(budget, "inductor")
    assert near == pytest.approx(eager, rel=1e-5)
    assert report is not None and report.measured is not None
    assert report.measured <= report.peak <= budget
    assert "compiled: " in str(report)


@pytest.mark.long
def test_without_it_gradients_are_bit_equal() -> None:
    for options in ({"lower": None}, {}):
        parameters, report = compiled(1 << 34, **options)
        assert not any(op.fn == "memgraph.segment" for op in report.forecast.trace.ops)
        assert all(map(torch.equal, parameters, eager()))


@pytest.mark.long
def test_updates_in_backward_stay_outside_of_segments() -> None:
    parameters, report = compiled(1 << 34, lower="inductor", fuse_update=True)
    fns = [op.fn for op in report.forecast.trace.ops]
    assert "memgraph.segment" in fns
    assert any("SGD" in fn for fn in fns)
    for ours, theirs in zip(parameters, eager(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_what_inductor_cant_compile_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr("memgraph.graph.inductor._segments", {})
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_inner", broken)
    with pytest.raises(memgraph.LoweringError, match=r"(?s)test_lowering.py.*no compiler.*lower=None"):
        compiled(1 << 34, lower="inductor")
