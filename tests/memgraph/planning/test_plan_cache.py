"""A plan is found in the cache when its call returns, without a search."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memgraph
from memgraph.graph.captured import Captured
from memgraph.options.compile_options import CompileOptions
from memgraph.planning import capture_step, plan_cache, search, variants
from memgraph.planning.progress import Progress
from memgraph.planning.search import PlanSearch
from memgraph.planning.step_graph import Call
from memgraph.system import measurement_cache
from passes import Machine, Op, PlanResult, Storage, Trace, make_plan
from passes.pipeline import FAIR_GAP
from tests.oracle.network import layers


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.GELU())))


def rows(count: int) -> Tensor:
    return torch.randn(count, 16, generator=torch.Generator().manual_seed(count))


def budget_for(count: int, share: float = 0.8) -> int:
    plain = memgraph.plan(net(), rows(count), budget="1GB").forecast
    there = sum(op.nbytes for op in plain.trace.ops if op.is_input)
    return there + int(share * (plain.peak - there))


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[Trace]:
    """The steps that were searched for; one step is kept."""
    monkeypatch.setattr(variants, "PLANS", 1)
    monkeypatch.setattr(variants, "NODES", 0)
    found: list[Trace] = []

    def counted(trace: Trace, machine: Machine, **given: Any) -> PlanResult:
        found.append(trace)
        return make_plan(trace, machine, **given)

    monkeypatch.setattr(search, "make_plan", counted)
    return found


def step(compiled: Any, x: Tensor) -> list[Tensor]:
    compiled.zero_grad()
    compiled(x).sum().backward()
    return [parameter.grad for parameter in compiled.parameters()]


def without_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_cache, "TRIED", 0)


def test_a_kind_of_call_that_returns_is_not_searched_for(
    searches: list[Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    without_neighbours(monkeypatch)
    compiled: Any = memgraph.compile(net(), budget_for(60), offload=None)
    searches.clear()
    plans: dict[int, object] = {}
    for epoch in range(3):
        for count in (64, 62):
            eager = net()
            eager(rows(count)).sum().backward()
            for ours, theirs in zip(step(compiled, rows(count)), eager.parameters(), strict=True):
                assert theirs.grad is not None and torch.equal(ours, theirs.grad)
            report = compiled.plan
            assert plans.setdefault(count, report.plan) == report.plan != ()
            assert report.measured <= report.peak <= report.budget
            assert len(searches) == (2 if epoch else len(plans))


@pytest.mark.long
@pytest.mark.parametrize("offload", [None, "auto"])
def test_a_later_process_finds_it_on_disk_with_what_is_proven(searches: list[Trace], offload: str | None) -> None:
    budget = budget_for(64)
    searches.clear()
    first = memgraph.plan(net(), rows(64), budget=budget, offload=offload)
    plan_cache._texts.clear()
    plan_cache._near.clear()
    second = memgraph.plan(net(), rows(64), budget=budget, offload=offload)
    assert len(searches) == 1
    assert second.plan == first.plan != ()
    assert (second.peak, second.bound_us) == (first.peak, first.bound_us)
    memgraph.plan(net(), rows(64), budget=budget - 64, offload=offload)
    memgraph.plan(net(), rows(64), budget=budget, offload=offload, time_limit=1000)
    assert len(searches) == 3


TRACE = layers(6)


def machine(share: float) -> Machine:
    return Machine(int(share * passes_peak()))


def passes_peak() -> int:
    return make_plan(TRACE, Machine(1 << 40)).forecast.peak


def once(found: list[PlanResult], **options: Any) -> PlanSearch:
    class Counted(PlanSearch):
        def search(self, trace: Trace, machine: Machine) -> PlanResult:
            found.append(make_plan(trace, machine))
            return found[-1]

    return Counted(CompileOptions(None, **options), Progress(), math.inf)


def test_other_prices_options_or_budgets_are_searched_for() -> None:
    found: list[PlanResult] = []
    search, tight = once(found), machine(0.7)
    for _ in range(2):
        assert search(TRACE, tight).plan == found[0].plan != ()
    assert len(found) == 1
    once(found, time_limit=1000.0)(TRACE, tight)
    search(TRACE, machine(0.72))
    repriced = replace(TRACE, ops=tuple(replace(op, us=op.us * 3) for op in TRACE.ops))
    plan_cache._near.clear()
    search(repriced, tight)
    assert len(found) == 4


def of_length(length: int) -> Trace:
    """The step for a longer or shorter input: bytes and times grow with it."""

    def sized(op: Op) -> Op:
        makes = tuple(Storage(made.name, made.nbytes * length // 64) for made in op.makes)
        return replace(op, makes=makes, us=op.us * length / 64)

    return replace(TRACE, ops=tuple(map(sized, TRACE.ops)))


def test_the_plan_of_a_neighbour_is_taken_where_it_is_near_what_is_proven() -> None:
    found: list[PlanResult] = []
    search, tight = once(found), machine(0.7)
    for length in (62, 66):
        search(of_length(length), tight)
    between = search(of_length(64), tight)
    assert len(found) == 2
    assert between.plan == found[1].plan
    assert between.forecast.peak <= tight.budget
    assert between.bound_us == 0.0  # no one has proven it of this step


def test_the_plan_of_a_distant_or_smaller_neighbour_is_not_taken() -> None:
    found: list[PlanResult] = []
    search, tight = once(found), machine(0.7)
    for length in (88, 60, 64):
        choice = search(of_length(length), tight)
        assert choice.forecast.peak <= tight.budget
    assert len(found) == 3
    assert found[2].overhead + FAIR_GAP < found[0].overhead


def test_a_plan_that_was_damaged_on_disk_is_searched_for_again() -> None:
    found: list[PlanResult] = []
    search, tight = once(found), machine(0.7)
    search(TRACE, tight)
    key = plan_cache.step_key(TRACE, tight, search.options.search_key)
    good = measurement_cache.read_cached(key, plan_cache.FILE)
    damaged: list[object] = [
        [],
        {},
        {**good, "decisions": ["recompute nothing"]},
        {**good, "by_section": 3, "prices": 5},
    ]
    for bad in damaged:
        plan_cache._texts.clear()
        plan_cache._near.clear()
        measurement_cache.write_cached(key, bad, plan_cache.FILE)
        assert search(TRACE, tight).plan == found[0].plan
    assert len(found) == 5


def test_what_is_kept_is_bounded_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_cache, "MEMORY_NBYTES", 5_000)
    monkeypatch.setattr(plan_cache, "DISK_NBYTES", 200_000)
    for i in range(100):
        plan_cache.put_facts(f"key {i}", f'"{"x" * 990}"')
    assert sum(map(len, plan_cache._texts.values())) <= 5_000
    assert list(plan_cache._texts)[-1] == "key 99"
    assert Path(os.environ["MEMGRAPH_CACHE"], plan_cache.FILE).stat().st_size <= 250_000
    there = [i for i in range(100) if measurement_cache.read_cached(f"key {i}", plan_cache.FILE)]
    assert 10 <= len(there) < 100


@pytest.mark.long
def test_a_kind_of_call_that_returns_is_not_captured_again(
    searches: list[Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    captured: list[int] = []
    real = capture_step.captured_call

    def counted(call: Call, *given: Any) -> Captured:
        captured.append(len(call.args[0]))
        return real(call, *given)

    monkeypatch.setattr(capture_step, "captured_call", counted)
    compiled: Any = memgraph.compile(net(), "1GB")
    for _ in range(3):
        for count in (64, 62, 60):
            eager = net()
            eager(rows(count)).sum().backward()
            for ours, theirs in zip(step(compiled, rows(count)), eager.parameters(), strict=True):
                assert theirs.grad is not None and torch.equal(ours, theirs.grad)
            assert len(compiled.plans) == 1
    assert captured == [64, 62]  # that with 62 has symbols, and serves 60


def test_captures_that_are_kept_are_bounded(searches: list[Trace], monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: Any = memgraph.compile(net(), "1GB")
    step(compiled, rows(64))
    nodes = len(compiled._latest.parts.captured.graph.graph.nodes)
    monkeypatch.setattr(variants, "CAPTURED_NODES", 2 * nodes)
    for count in (62, 60, 58, 56):
        step(compiled, rows(count))
    assert sum(bool(each.captured and not each.steps) for each in compiled._kept.variants) == 2
