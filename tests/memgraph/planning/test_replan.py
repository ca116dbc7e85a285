"""A step is planned once more with what its ops took in it, if that pays; gradients and budget are kept."""

from __future__ import annotations

import gc
import itertools
import json
import sqlite3
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import memgraph
from memgraph.planning import replan
from memgraph.planning.replan import replanned, reprice, with_measured_times
from memgraph.profile import op_profiler
from memgraph.profile import step_timer as times_of
from memgraph.profile.link_bandwidth import Link
from memgraph.profile.machine_profile import CopyOverhead
from memgraph.profile.step_timer import Clock, StepTimes, WallTimes
from memgraph.report.step_times import FEW, LENGTH
from memgraph.runtime.step import Step
from memgraph.storage import io_threads
from memgraph.storage.async_copy import copy_rates
from memgraph.storage.file_tier import FileTier
from memgraph.system import measurement_cache
from passes import BudgetError, Machine, Op, PlanResult, Recompute, Trace, apply, predict
from passes.pipeline import make_plan
from passes.simulate.forecast import update_nbytes
from tests.passes.simulate.test_forecast import AWAY, MACHINE, STEP

TRUE = {"aten.gelu.default": 10.0, "aten.addmm.default": 1000.0, "aten.mm.default": 1000.0}


FAST = Link(((1000, 0.001),))  # a link on which whatever is sent away costs nothing


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU())))


def loss(out: Tensor) -> Tensor:
    return out.square().mean()


def truth(op: Op) -> float:
    return TRUE.get(op.fn, 5.0)


def price(path: Path, us: dict[str, float]) -> None:
    """Write prices into the cache: of ops by a part of their name, as if they had been timed well."""
    with sqlite3.connect(path) as file:
        for key, value in file.execute("SELECT key, value FROM costs").fetchall():
            fn = key.split("(")[0].removeprefix("ran ")
            if key.startswith("ran "):
                known = {name: fact for name, fact in json.loads(value).items() if name != "once"}
                text = json.dumps(known | {"us": us.get(fn, 5.0)})
                file.execute(
                    "UPDATE costs SET value = ?, digest = ? WHERE key = ?",
                    (text, measurement_cache._digest(key, text), key),
                )


@pytest.fixture
def x() -> Tensor:
    return torch.randn(512, 64, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def compiled(x: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Compiles a module whose ops take what TRUE says, with the given prices in the cache."""
    monkeypatch.setenv("MEMGRAPH_CACHE", str(tmp_path))
    monkeypatch.setattr(op_profiler, "_known", {})
    memgraph.plan(net(), x, budget=1 << 30, loss=loss)
    run = Clock.run

    def as_it_were(clock: Clock, half: fx.GraphModule, values: list[Tensor]) -> Any:
        results = run(clock, half, values)
        ops = (node for node in half.graph.nodes if node.op == "call_function")
        names = {node.name: str(node.target) for node in ops}
        clock.ops |= {name: TRUE.get(names[name], 5.0) for name in clock.ops if name in names}
        return results

    def compile(us: dict[str, float], budget: int, **options: Any) -> Any:
        price(tmp_path / "costs.sqlite", us)
        monkeypatch.setattr(op_profiler, "_known", {})
        monkeypatch.setattr(Clock, "run", as_it_were)
        return memgraph.compile(net(), budget, loss=loss, offload=None, **options)

    return compile


def budget_of(x: Tensor, share: float) -> int:
    plain = memgraph.plan(net(), x, budget=1 << 30, loss=loss).forecast
    there = sum(op.nbytes for op in plain.trace.ops if op.is_input)
    return there + int(share * (plain.peak - there))


def eager(x: Tensor) -> list[Tensor | None]:
    module = net()
    loss(module(x)).backward()
    return [parameter.grad for parameter in module.parameters()]


def step(module: Any, x: Tensor) -> list[Tensor | None]:
    module.zero_grad(set_to_none=True)
    module(x).backward()
    return [parameter.grad for parameter in module.parameters()]


def same(these: list[Tensor | None], those: list[Tensor | None]) -> bool:
    return all(a is not None and b is not None and torch.equal(a, b) for a, b in zip(these, those, strict=True))


def again(report: memgraph.Report) -> set[str]:
    trace = report.forecast.trace
    return {trace.op[said.value].fn for said in report.plan if isinstance(said, Recompute)}


# --- a module


def test_a_wrong_price_is_detected_and_the_step_is_planned_again_once(compiled: Callable[..., Any], x: Tensor) -> None:
    budget = budget_of(x, 0.75)
    module = compiled({**TRUE, "aten.gelu.default": 1e6}, budget)
    expected = eager(x)
    seen: list[Step] = []
    for _ in range(5):
        assert same(step(module, x), expected)
        seen.append(module._latest)
    assert seen[0] is seen[1]
    assert seen[1] is not seen[2]
    assert seen[2] is seen[3] is seen[4]
    assert "aten.gelu.default" not in again(seen[1].report)
    assert "aten.gelu.default" in again(seen[2].report)
    for now in (seen[1].report, seen[2].report):
        assert now.measured is not None
        assert now.measured <= now.peak <= budget
        assert now.measured_us is not None
        assert now.measured_us > 0


@pytest.mark.long
def test_right_prices_keep_the_plan(compiled: Callable[..., Any], x: Tensor) -> None:
    module = compiled(TRUE, budget_of(x, 0.75))
    step(module, x)
    first = module._latest
    for _ in range(3):
        assert same(step(module, x), eager(x))
    assert module._latest is first
    assert not first.needs_replan
    assert first.report.plan


def test_a_step_that_fits_without_a_plan_is_timed_and_never_planned_again(
    x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replan, "replanned", lambda *args: pytest.fail("planned again"))
    module = memgraph.compile(net(), 1 << 30, loss=loss)
    step(module, x)
    assert module.plan.measured_us is None
    for _ in range(3):
        step(module, x)
    assert module.plan.measured_us is not None


def test_a_plan_that_was_given_is_kept(
    compiled: Callable[..., Any], x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = budget_of(x, 0.75)
    module = compiled({**TRUE, "aten.gelu.default": 1e6}, budget)
    module(x)
    given = memgraph.compile(net(), budget, loss=loss, offload=None, plan=module.plan.to_json())
    for _ in range(4):
        step(given, x)
    assert given.plan.plan == module.plan.plan


@pytest.mark.long
def test_a_run_of_the_old_plan_ends_after_the_new_plan_was_made(compiled: Callable[..., Any], x: Tensor) -> None:
    module = compiled({**TRUE, "aten.gelu.default": 1e6}, budget_of(x, 0.75))
    step(module, x)
    module.zero_grad(set_to_none=True)
    late = module(x)
    old = module._latest
    step(module, x)
    step(module, x)
    assert module._latest is not old
    module.zero_grad(set_to_none=True)
    late.backward()
    assert same([parameter.grad for parameter in module.parameters()], eager(x))


def test_the_old_tier_closes_itself(x: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []
    close = FileTier.close
    monkeypatch.setattr(FileTier, "close", lambda tier: (closed.append(tier.nbytes), close(tier))[1])  # type: ignore
    monkeypatch.setattr(replan, "replanned", lambda choice, trace, machine, search: choice)
    monkeypatch.setattr("memgraph.profile.machine_profile.measure_files", lambda folder, room: (FAST, FAST))
    monkeypatch.setattr(
        "memgraph.profile.machine_profile.measure_copy_overhead", lambda folder, links, room: CopyOverhead()
    )
    monkeypatch.setattr("memgraph.profile.machine_profile.STAGING", 0)  # more than this step has
    module = memgraph.compile(net(), budget_of(x, 0.75), loss=loss, spill_dir=tmp_path)
    step(module, x)
    step(module, x)
    tier = module._latest.parts.tier
    assert isinstance(tier, FileTier)
    nbytes = tier.nbytes
    del tier
    assert same(step(module, x), eager(x))
    gc.collect()
    assert nbytes in closed
    assert module._latest.times is None
    assert not module._latest._replan_due


# --- prices


def priced(trace: Trace, us: Callable[[Op], float]) -> Trace:
    return replace(
        trace, ops=tuple(op if op.is_input else replace(op, us=us(op) if op.makes else 0.0) for op in trace.ops)
    )


def test_ops_that_are_alike_take_the_mean_of_all_their_runs_but_interrupted_ones(x: Tensor) -> None:
    trace = priced(memgraph.plan(net(), x, budget=1 << 30, loss=loss).forecast.trace, truth)
    gelus = [op.name for op in trace.ops if op.fn == "aten.gelu.default"]
    ops = dict.fromkeys(gelus, 30.0) | {gelus[0]: 9000.0, gelus[1]: 60.0}
    found = reprice(trace, trace, StepTimes(ops, 1.0))
    assert {found.op[name].us for name in gelus} == {round((30 * (len(gelus) - 2) + 60) / (len(gelus) - 1), 1)}
    assert all(op == found.op[op.name] for op in trace.ops if op.name not in gelus)


def test_what_interrupts_some_ops_makes_all_of_them_dearer_but_for_the_longest_once(x: Tensor) -> None:
    report = memgraph.plan(net(), x, budget=budget_of(x, 0.75), loss=loss, offload=None)
    choice = replace(report.choice, captured=predict(priced(report.choice.captured.trace, truth), report.machine))
    ran = choice.forecast.trace
    ops = {op.name: truth(op) for op in ran.ops if not op.is_input and op.makes}
    matmuls = [name for name in ops if ran.op[name].fn == "aten.addmm.default"]

    def forecast_us(late: dict[str, float]) -> float:
        trace, machine = with_measured_times(choice, report.machine, StepTimes(ops | late, 1.0))
        return predict(apply(trace, choice.plan), machine).us

    usual = forecast_us({})
    assert usual == pytest.approx(sum(ops.values()))
    assert forecast_us({matmuls[0]: 50_000.0}) == usual
    both = forecast_us({matmuls[0]: 50_000.0, matmuls[1]: 9000.0})
    assert both == pytest.approx(usual + 8000.0, rel=1e-3)


def test_waking_what_copies_takes_of_all_ops_and_not_of_the_copies() -> None:
    machine = replace(MACHINE, link=replace(MACHINE.link, call_us=10.0, us_per_byte=0.1))
    choice = PlanResult(AWAY, predict(STEP, machine), predict(apply(STEP, AWAY), machine))
    ran = choice.forecast.trace.ops
    starts = [op.name for op in ran if op.fn in ("memgraph.offload.default", "memgraph.reload.default")]
    ops = {op.name: 1000.0 for op in ran if not op.is_input and not op.fn.startswith("memgraph.")}
    quiet, _ = with_measured_times(choice, machine, StepTimes(ops | dict.fromkeys(starts, 10.0), 1.0))
    busy, found = with_measured_times(choice, machine, StepTimes(ops | dict.fromkeys(starts, 1010.0), 1.0))
    assert {op.us for op in quiet.ops if op.us} == {1000.0}
    share = 1 + (len(starts) - 1) / len(ops)  # the longest start is left out
    assert {op.us for op in busy.ops if op.us} == {round(1000.0 * share, 1)}
    assert found.link.call_us == 10.0


def test_a_gain_of_two_percent_or_less_is_not_searched_for(x: Tensor) -> None:
    report = memgraph.plan(net(), x, budget=budget_of(x, 0.75), loss=loss, offload=None)
    trace = priced(report.choice.captured.trace, truth)
    machine = report.machine
    choice = make_plan(trace, machine)
    times = StepTimes({op.name: op.us for op in choice.forecast.trace.ops}, choice.forecast.us)
    assert choice.overhead < 0.02
    assert (
        replanned(choice, *with_measured_times(choice, machine, times), lambda *args: pytest.fail("searched")) is None
    )


def test_a_search_that_fails_keeps_the_plan(x: Tensor) -> None:
    report = memgraph.plan(net(), x, budget=budget_of(x, 0.75), loss=loss, offload=None)

    def fails(trace: Trace, machine: Machine) -> PlanResult:
        raise BudgetError("none", machine.budget, machine.budget + 1)

    slow = dict.fromkeys((op.name for op in report.forecast.trace.ops if op.recomputes), 1e6)
    plain = {op.name: 0.1 for op in report.choice.captured.trace.ops}
    measured = with_measured_times(report.choice, report.machine, StepTimes(plain | slow, 1.0))
    assert replanned(report.choice, *measured, fails) is None


def test_links_are_as_fast_as_the_step_found_them(tmp_path: Path) -> None:
    lease = FileTier([1 << 20] * 2, tmp_path).lease()
    assert copy_rates(lease.copies, half_duplex=True) == (0.0, 0.0)
    sent = torch.ones(1 << 20, dtype=torch.uint8)
    lease.offload(0, sent)
    lease.free(0)
    out, back = copy_rates(lease.copies, half_duplex=True)
    assert out > 0
    assert back == 0.0
    lease.release()


@pytest.mark.long
@pytest.mark.parametrize("fuse", [False, True])
def test_copies_of_the_update_tell_of_the_links_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fuse: bool
) -> None:
    seen: list[tuple[StepTimes, int, int]] = []

    def note(choice: PlanResult, machine: Machine, times: StepTimes) -> Any:
        moved = sum(part.nbytes for parts in times.copies[-1].values() for part in parts)
        ran = choice.forecast.trace  # which another plan may replace
        far = sum(sum(both) for op in ran.ops if op.phase == "update" for both in update_nbytes(ran, op).values())
        seen.append((times, moved, far))
        return with_measured_times(choice, machine, times)

    monkeypatch.setattr(replan, "with_measured_times", note)
    module = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    states = 2 * sum(parameter.nbytes for parameter in module.parameters())
    adam = torch.optim.Adam(module.parameters())
    called = memgraph.compile(module, states, optimizer=adam, loss=loss, spill_dir=tmp_path, fuse_update=fuse)
    for _ in range(4):
        called(torch.ones(4, 256)).backward()
        adam.step()
        adam.zero_grad()
    ((times, moved, far),) = seen
    assert moved >= far > 0 and min(times.rates(half_duplex=True)) > 0


def test_a_slot_that_comes_again_and_again_counts_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lease, sent, plain = (
        FileTier([1 << 20], tmp_path).lease(),
        torch.ones(1 << 20, dtype=torch.uint8),
        io_threads.transfer_pages,
    )
    lease.offload(0, sent)
    lease.free(0)

    def slow(*args: Any) -> None:
        time.sleep(0.1)
        plain(*args)

    monkeypatch.setattr(io_threads, "transfer_pages", slow)
    lease.reload(0, torch.empty_like(sent))
    lease.wait(0)
    monkeypatch.setattr(io_threads, "transfer_pages", plain)
    lease.reload(0, torch.empty_like(sent))
    lease.wait(0)
    _, back = copy_rates(lease.copies, half_duplex=True)
    lease.release()
    assert 0.0 < back <= (2 << 20) / 100_000  # two copies, the first of 0.1 s or more


# --- later steps


@pytest.mark.long
def test_a_plan_is_looked_at_again_once_its_steps_take_longer_for_good(
    compiled: Callable[..., Any], x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget, expected = budget_of(x, 0.75), eager(x)
    monkeypatch.setitem(TRUE, "aten.gelu.default", 1e6)
    module = compiled(TRUE, budget)
    for _ in range(3):
        step(module, x)
    first = module._latest
    assert "aten.gelu.default" not in again(module.plan)
    monkeypatch.setitem(TRUE, "aten.gelu.default", 10.0)  # from now on, at each measurement
    monkeypatch.setattr(WallTimes, "us", 1e9)
    for _ in range(LENGTH):
        few = len(first.history.walls) < FEW
        assert module._latest is first and ("at the median" not in str(module.plan)) is few
        assert same(step(module, x), expected)
    assert "the latest steps took" not in str(module.plan)  # it is being looked at, with a new window
    for _ in range(2):
        assert same(step(module, x), expected)
    assert module._latest is not first
    assert "aten.gelu.default" in again(module.plan)
    assert module.plan.measured is not None and module.plan.measured <= module.plan.peak <= budget


@pytest.mark.long
@pytest.mark.parametrize(("off", "said"), [(1.05, False), (1.5, True), (0.5, True)])
def test_a_report_says_when_later_steps_are_off_their_forecast(
    off: float, said: bool, compiled: Callable[..., Any], x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = compiled(TRUE, 1 << 30)
    for _ in range(3 + LENGTH):
        monkeypatch.setattr(WallTimes, "us", off * module._latest.forecast_us if module._latest else 0.0)
        step(module, x)
    assert ("the latest steps took" in str(module.plan)) is said
    assert (f"{off - 1:+.0%} on the forecast of" in str(module.plan)) is said


def test_what_forward_saves_has_the_time_that_it_took_and_not_that_of_being_handed_to_backward(
    x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(times_of, "now", lambda device: float(next(ticks)))
    module = memgraph.compile(net(), 1 << 30, loss=loss)
    for _ in range(2):
        step(module, x)
    times = module._latest.times
    assert times is not None
    assert sum(times.ops.values()) == times.us - 2e6  # a tick each to return from forward and from backward


def test_every_op_is_timed_and_what_is_computed_is_the_same() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.relu().exp()

    half = fx.symbolic_trace(Two())
    clock = Clock(torch.device("cpu"))
    x = torch.randn(8)
    assert torch.equal(clock.run(half, x), x.relu().exp())  # type: ignore[arg-type]
    assert {"relu", "exp"} <= set(clock.ops)
    assert 0 < sum(clock.ops.values()) <= clock.us
