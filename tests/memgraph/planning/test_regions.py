"""All ops between two memory ops compiled as one: gradients are eager's but for rounding, memory ops keep their places,
bytes are those of the forecast, and what can't be so runs in segments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memgraph
from memgraph.errors import LoweringError
from memgraph.graph import inductor
from memgraph.planning.lowering import lowering
from memgraph.profile.region_profiler import RegionCost, RegionProfiler
from memgraph.report.tables import mb
from memgraph.storage.file_tier import FileLease
from passes.ir.ops import FREE, OFFLOAD, RELOAD, SEGMENT, WAIT, is_region
from tests.memgraph.planning.test_lowering import compiled, eager


@pytest.fixture(autouse=True)
def _all_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that does other work may time a region as slower than its ops."""
    monkeypatch.setattr(lowering, "faster_regions", lambda trace, found, *_: tuple(found))
    monkeypatch.setattr(lowering, "_refused", {})
    monkeypatch.setattr("memgraph.profile.region_profiler._known", {})


def assert_close(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


def count(report: memgraph.Report) -> int:
    return sum(map(is_region, report.forecast.trace.ops))


@pytest.mark.long
def test_a_step_without_memory_ops_is_two_compiled_halves() -> None:
    parameters, report = compiled(1 << 34, lower="inductor")
    assert "2 of them are all ops between two memory ops; forward and backward as a whole" in str(report)
    assert count(report) == 2
    assert report.measured == report.peak < report.choice.forecast.peak  # fused, it never has all that its ops had
    assert_close(parameters, eager())


@pytest.mark.long
def test_memory_ops_run_where_the_plan_has_them_and_the_budget_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    _, plain = compiled(1 << 34)
    ran: list[str] = []

    def noting(owner: type, method: str, fn: str) -> None:
        call: Callable[..., Any] = getattr(owner, method)

        def noted(self: Any, *args: Any) -> Any:
            ran.append(fn)
            return call(self, *args)

        monkeypatch.setattr(owner, method, noted)

    for method, fn in (("offload", OFFLOAD), ("free", FREE), ("reload", RELOAD), ("wait", WAIT)):
        noting(FileLease, method, fn)
    noting(inductor.Segment, "boxed", SEGMENT)
    budget = int(plain.peak * 0.45)
    parameters, report = compiled(budget, lower="inductor")
    fns = [op.fn for op in report.forecast.trace.ops if op.fn in (OFFLOAD, FREE, RELOAD, WAIT, SEGMENT)]
    assert fns.count(OFFLOAD) and count(report) > 2
    assert ran[-len(fns) :] == fns  # of the last of four steps
    assert report.measured is not None and report.measured <= report.peak <= budget
    assert_close(parameters, eager())


class Dropping(nn.Module):
    """Two outputs; the gradient of the second would be multiplied by infinity."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = nn.functional.dropout(self.first(x).sigmoid(), 0.3)
        y = self.second(x).tanh()
        return y.square().mean(), (x * torch.tensor(float("inf"))).sigmoid().sum() + y.exp().sum()


def gradients(model: nn.Module, call: Any, outputs: Callable[[Any], Tensor]) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    outputs(call(torch.ones(8, 16))).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.long
def test_random_numbers_are_eagers_and_an_output_without_a_loss_adds_nothing() -> None:
    model = Dropping()
    ours = memgraph.compile(model, "1GB", lower="inductor")
    for outputs in (lambda out: out[0], lambda out: out[0] * 2, lambda out: out[0]):
        found = gradients(model, ours, outputs)
        assert_close(found, gradients(model, model, outputs))
        assert all(gradient.isfinite().all() for gradient in found)
        assert ours.plan.measured is not None and ours.plan.measured <= ours.plan.peak
    assert count(ours.plan) and ours.plan.peak >= ours.plan.choice.forecast.peak


@pytest.mark.long
def test_a_kept_graph_is_differentiated_twice() -> None:
    model = Dropping()
    ours = memgraph.compile(model, "1GB", lower="inductor")

    def twice(call: Any) -> list[Tensor]:
        model.zero_grad(set_to_none=True)
        torch.manual_seed(3)
        loss = call(torch.ones(8, 16))[0]
        loss.backward(retain_graph=True)
        loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    assert_close(twice(ours), twice(model))


@pytest.mark.long
def test_a_region_over_the_budget_runs_in_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    _, plain = compiled(1 << 34)
    measured = RegionProfiler._measured

    def larger(self: RegionProfiler, *args: Any) -> RegionCost | str:
        cost = measured(self, *args)
        return replace(cost, workspace=1 << 34) if isinstance(cost, RegionCost) else cost

    monkeypatch.setattr(RegionProfiler, "_measured", larger)
    parameters, report = compiled(plain.peak, lower="inductor")
    assert count(report) == 0 and "over the budget" in str(report)
    assert report.measured is not None and report.measured <= report.peak <= plain.peak
    assert_close(parameters, eager())


@pytest.mark.long
def test_a_region_that_takes_more_in_the_step_runs_in_segments_from_the_second_step_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured = RegionProfiler._measured

    def smaller(self: RegionProfiler, *args: Any) -> RegionCost | str:
        cost = measured(self, *args)
        return replace(cost, workspace=cost.workspace - (1 << 20)) if isinstance(cost, RegionCost) else cost

    monkeypatch.setattr(RegionProfiler, "_measured", smaller)
    ran: list[int] = []
    boxed = inductor.Segment.boxed

    def noted(self: inductor.Segment, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        ran.append(len(tensors))
        return boxed(self, tensors)

    monkeypatch.setattr(inductor.Segment, "boxed", noted)
    parameters, report = compiled(1 << 34, lower="inductor")
    assert count(report) == 0
    assert "not compiled as one: measured 1.0 MB over the forecast" in str(report)
    assert report.measured is not None and report.measured <= report.peak
    assert_close(parameters, eager())


@pytest.mark.long
def test_what_inductor_refuses_runs_in_segments_and_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_segment, tried = inductor.compile_segment, list[int]()

    def refusing(part: Any) -> inductor.Segment:
        size = sum(node.op == "call_function" for node in part.nodes)
        if size > 20:
            tried.append(size)
            raise LoweringError(f"Inductor can't compile {size} ops")
        return compile_segment(part)

    monkeypatch.setattr(inductor, "compile_segment", refusing)
    for _ in range(2):
        parameters, report = compiled(1 << 34, lower="inductor")
        assert count(report) == 0 and "1 refused (Inductor can't compile" in str(report)
        assert_close(parameters, eager())
    assert len(tried) == 2


def profiled(run: Callable[[list[Tensor]], tuple[Tensor, ...]], freed: bool) -> RegionCost | str:
    profiler, segment = RegionProfiler([], 1 << 30), inductor.Segment(str(id(run)), run)
    return profiler(segment, [torch.empty(1000), torch.empty(1000)], [freed, freed])


def test_the_workspace_is_what_the_peak_has_beyond_results_and_what_was_there_before() -> None:
    def frees_first(given: list[Tensor]) -> tuple[Tensor, ...]:
        size = given[0].shape
        given.clear()
        return (torch.empty(size),)

    def frees_last(given: list[Tensor]) -> tuple[Tensor, ...]:
        room = torch.empty(500)
        return (torch.empty(given.pop().shape + room[:0].shape[1:]),)

    cost = profiled(frees_first, freed=True)
    assert isinstance(cost, RegionCost) and cost.workspace == -4000  # 8000 bytes before it, and never more
    cost = profiled(frees_first, freed=False)
    assert isinstance(cost, RegionCost) and cost.workspace == 0
    cost = profiled(frees_last, freed=False)
    assert isinstance(cost, RegionCost) and cost.workspace == 2000


def test_a_region_whose_results_share_memory_is_refused() -> None:
    def same(given: list[Tensor]) -> tuple[Tensor, ...]:
        result = given[0] + 1
        return result, result.view(10, 100)

    def input_itself(given: list[Tensor]) -> tuple[Tensor, ...]:
        return (given[0].view(10, 100),)

    assert profiled(same, freed=True) == profiled(input_itself, freed=False) == "results share memory"


def test_fewer_bytes_than_before_are_printed_in_megabytes() -> None:
    assert mb(-3_378_176) == "-3.4 MB" and mb(-100) == "-100 B"
