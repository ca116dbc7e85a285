"""A value that is cast for its copy comes back rounded to bfloat16; without `wire_dtype` nothing is rounded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memgraph
from memgraph.planning import replan, search
from memgraph.profile import link_bandwidth as links
from memgraph.profile import op_profiler
from memgraph.profile.link_bandwidth import Link
from memgraph.profile.machine_profile import CopyOverhead
from memgraph.profile.memory_meter import measure_peak
from memgraph.storage.wire_cast import LARGEST, narrow, widen
from passes import Machine, Offload, PlanResult, Trace, apply, predict
from passes.analysis.reuse_gaps import ReuseGaps
from passes.ir.machine import CAST_WORKSPACE
from passes.lp.problem import SMALLEST_OFFLOAD
from passes.schedule.schedule import Placement, schedule

CPU = torch.device("cpu")
ROWS, WIDTH = 1040, 72  # a shape that no other test prices


class Layers(nn.Module):
    """Backward reads two values of 299520 bytes of each layer."""

    def __init__(self, count: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = nn.functional.gelu(layer(x))
        return x.square().mean()


def batch() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(3))


def cast_all(trace: Trace, machine: Machine, **_: Any) -> PlanResult:
    """In the place of the search: all that may be cast is."""
    gaps = ReuseGaps(trace)
    may = {s for s in gaps.uses if s in gaps.whole_value and gaps.wire_nbytes(s, machine.cast.dtype)}
    fates = {s: Placement.CAST_OFFLOAD for s in may if trace.nbytes[s] >= SMALLEST_OFFLOAD}
    plan = schedule(gaps, fates, machine)
    return PlanResult(plan, predict(trace, machine), predict(apply(trace, plan), machine))


def cast_values(report: memgraph.Report) -> set[str]:
    return {decision.value for decision in report.plan if isinstance(decision, Offload) and decision.wire}


def trained(model: nn.Module, step: Callable[[], Tensor], steps: int = 3) -> list[Tensor]:
    """Losses, gradients and parameters of some steps."""
    optimizer, facts = torch.optim.SGD(model.parameters(), lr=0.1), list[Tensor]()
    for _ in range(steps):
        loss = step()
        loss.backward()
        facts += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return [*facts, *(p.detach().clone() for p in model.parameters())]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


# --- the casts themselves


@pytest.mark.parametrize("shape", [(0,), (), (1,), (3, 5), (4, 1, 7), (40_000,)])
def test_a_cast_rounds_as_torch_does(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape) * 10.0 ** torch.randint(-44, 38, shape)
    assert torch.equal(narrow(x), x.to(torch.bfloat16))
    assert torch.equal(widen(narrow(x)), x.to(torch.bfloat16).to(torch.float32))


def test_a_cast_keeps_the_strides() -> None:
    x = torch.randn(4, 3, 8, 6).to(memory_format=torch.channels_last).transpose(0, 1)
    assert narrow(x).stride() == x.stride() == widen(narrow(x)).stride()
    assert torch.equal(narrow(x), x.to(torch.bfloat16))


@pytest.mark.parametrize("beside", [0.0, torch.inf, -torch.inf, torch.nan])
def test_no_number_becomes_infinite(beside: float) -> None:
    most = torch.finfo(torch.float32).max
    x = torch.randn(40_000)
    x[7], x[20_000], x[39_999], x[100], x[101] = most, -most, 3.39e38, beside, -beside
    assert x.to(torch.bfloat16)[7].isinf()  # which torch alone makes of it
    y = narrow(x)
    assert y[7] == LARGEST and y[20_000] == -LARGEST
    rest = torch.ones(40_000, dtype=torch.bool)
    rest[[7, 20_000]] = False
    assert torch.equal(y[rest].nan_to_num(0.5), x.to(torch.bfloat16)[rest].nan_to_num(0.5))
    assert torch.equal(y.isinf(), x.isinf()) and torch.equal(y.isnan(), x.isnan())


@pytest.mark.parametrize("odd", [0.0, torch.inf, torch.nan, torch.finfo(torch.float32).max])
def test_a_cast_takes_no_more_beside_its_result_than_its_workspace(odd: float) -> None:
    x = torch.randn(300, 1000)
    x[5, 5] = odd
    narrow(x)
    y, allocated = measure_peak(lambda: narrow(x), CPU)
    assert allocated is not None and y.nbytes <= allocated.peak <= y.nbytes + CAST_WORKSPACE


def test_a_tensor_with_gaps_is_refused() -> None:
    with pytest.raises(ValueError, match="gaps or overlaps"):
        narrow(torch.randn(4, 8)[:, ::2])


# --- what was asked for


@pytest.mark.parametrize("ask", [memgraph.compile, memgraph.plan, memgraph.sweep])
def test_only_bfloat16_is_taken(ask: Callable[..., Any]) -> None:
    for dtype in (torch.float16, torch.float32, torch.float64, torch.int8, torch.float8_e4m3fn, torch.complex64):
        with pytest.raises(ValueError, match=f"wire_dtype={dtype}: .*give torch.bfloat16, .* or None"):
            ask(Layers(), wire_dtype=dtype)
    with pytest.raises(ValueError, match="65504"):
        ask(Layers(), wire_dtype=torch.float16)


def budget_below(model: nn.Module, *args: Tensor) -> int:
    return memgraph.plan(model, *args, budget="1GB").peak - 1


def test_training_is_eagers_with_the_cast_values_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """In eager, what autograd saves of these values is rounded as it is saved."""
    budget = budget_below(Layers(), batch())
    monkeypatch.setattr(search, "make_plan", cast_all)
    model = Layers()
    compiled = memgraph.compile(model, budget, wire_dtype=torch.bfloat16)
    ours = trained(model, lambda: compiled(batch()))
    report = compiled.plan
    assert report.measured is not None and report.measured <= report.peak <= budget
    cast = cast_values(report)
    assert cast >= {"addmm", "gelu", "addmm_7"}
    assert not same(ours, trained(plain := Layers(), lambda: plain(batch())))
    rounding = Layers()
    assert same(ours, trained(rounding, lambda: rounded(rounding, cast)))


def rounded(model: Layers, cast: set[str]) -> Tensor:
    """An eager forward; of the values named `cast` autograd saves what they are in bfloat16."""
    names: dict[int, str] = {}
    alive: list[Tensor] = []  # so that no address is used twice

    def pack(saved: Tensor) -> Tensor:
        return saved.bfloat16().float() if names.get(saved.data_ptr()) in cast else saved

    def named(value: Tensor, name: str) -> Tensor:
        names[value.data_ptr()] = name
        alive.append(value)
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        x = batch()
        for i, layer in enumerate(model.layers):
            number = f"_{i}" if i else ""
            x = named(nn.functional.gelu(named(layer(x), f"addmm{number}")), f"gelu{number}")
        return x.square().mean()


@pytest.fixture
def slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every op takes 5 ms, and a copy of a value as long as two of them; a cast takes nothing
    to speak of."""
    monkeypatch.setattr(op_profiler, "shortest_us", lambda *_, **__: 5000.0)
    monkeypatch.setattr(op_profiler, "write_cached", lambda key, value: None)
    monkeypatch.setattr(op_profiler, "write_all_cached", lambda values: None)
    monkeypatch.setattr(op_profiler, "read_cached", lambda key: None)
    monkeypatch.setattr(op_profiler, "read_all_cached", dict.fromkeys)
    monkeypatch.setattr(op_profiler, "_known", {})
    monkeypatch.setattr(links, "_known", {})
    slow, fast = Link(((1000, 30.0),)), Link(((1000, 0.1),))
    monkeypatch.setattr("memgraph.profile.machine_profile.measure_files", lambda folder, room: (slow, slow))
    monkeypatch.setattr(
        "memgraph.profile.machine_profile.measure_copy_overhead", lambda folder, links, room: CopyOverhead()
    )
    monkeypatch.setattr("memgraph.profile.machine_profile.measure_casts", lambda device, room: (fast, fast))
    monkeypatch.setattr(replan, "replanned", lambda *_: None)


@pytest.mark.long
@pytest.mark.usefixtures("slow_link")
def test_the_planner_casts_where_that_pays_and_keeps_the_promise() -> None:
    budget = budget_below(Layers(), batch()) * 6 // 10
    model = Layers()
    compiled = memgraph.compile(model, budget, wire_dtype=torch.bfloat16)
    trained(model, lambda: compiled(batch()), steps=2)
    report = compiled.plan
    assert cast_values(report)
    assert report.measured is not None and report.measured <= report.peak <= budget
    plain = memgraph.plan(Layers(), batch(), budget=budget)
    assert report.forecast.us < plain.forecast.us
    assert f"lossy: {len(cast_values(report))} values of" in str(report)
    assert "offload as bf16" in str(report)


@pytest.mark.long
@pytest.mark.usefixtures("slow_link")
def test_without_wire_dtype_nothing_is_rounded() -> None:
    budget = budget_below(Layers(), batch()) - 1_300_000
    model = Layers()
    compiled = memgraph.compile(model, budget)
    ours = trained(model, lambda: compiled(batch()))
    assert compiled.plan.plan and not cast_values(compiled.plan)
    assert compiled.plan.machine.cast.dtype == "" and "lossy" not in str(compiled.plan)
    assert same(ours, trained(eager := Layers(), lambda: eager(batch())))


@pytest.mark.long
def test_what_is_narrow_already_goes_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Layers().bfloat16(), batch().bfloat16()
    budget = budget_below(model, x)
    monkeypatch.setattr(search, "make_plan", cast_all)
    assert memgraph.plan(model, x, budget=budget, wire_dtype=torch.bfloat16).plan == ()


def test_with_nowhere_to_go_nothing_is_cast() -> None:
    budget = budget_below(Layers(), batch()) - 100_000
    report = memgraph.plan(Layers(), batch(), budget=budget, offload=None, wire_dtype=torch.bfloat16)
    assert report.plan and not cast_values(report) and report.machine.cast.dtype == ""


@pytest.mark.long
def test_a_saved_plan_with_casts_is_used_again_and_only_where_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    budget = budget_below(Layers(), batch())
    with monkeypatch.context() as patch:
        patch.setattr(search, "make_plan", cast_all)
        report = memgraph.plan(Layers(), batch(), budget=budget, wire_dtype=torch.bfloat16)
    text = report.to_json()
    assert memgraph.SavedPlan.from_json(text).plan == report.plan
    again = memgraph.plan(Layers(), batch(), budget=budget, plan=text, wire_dtype=torch.bfloat16)
    assert again.plan == report.plan and cast_values(again)
    with pytest.raises(memgraph.PlanError, match="rounds offloaded values to bf16, which needs wire_dtype="):
        memgraph.plan(Layers(), batch(), budget=budget, plan=text)


@pytest.mark.long
def test_a_sweep_may_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    real = memgraph.sweep.__globals__["make_plan"]
    spy = lambda trace, machine, **rest: seen.append(machine.cast.dtype) or real(trace, machine, **rest)  # type: ignore[func-returns-value]  # noqa: E731
    monkeypatch.setitem(memgraph.sweep.__globals__, "make_plan", spy)
    room = budget_below(Layers(), batch())
    memgraph.sweep(Layers(), batch(), budgets=[room - 100_000], wire_dtype=torch.bfloat16)
    assert set(seen) == {"bf16"}
    seen.clear()
    memgraph.sweep(Layers(), batch(), budgets=[room - 100_000])
    assert set(seen) == {""}
