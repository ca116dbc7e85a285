"""On a GPU: gradients are eager's to the bit, bytes stay under the budget, and copies may be late."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import memgraph
from benchmarks.blocks import SHAPES, Stack
from memgraph.planning import search
from memgraph.profile import link_bandwidth, op_profiler
from memgraph.profile.op_profiler import FLUSHED, OpProfiler, cold_us
from memgraph.storage import pinned_tier
from memgraph.storage.pinned_pool import PINNED_POOL
from memgraph.storage.wire_cast import narrow, widen
from passes.schedule.schedule import Placement
from tests.support.forced_plans import all_given_up, given_up
from tests.support.numbers import hard, same

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]
CUDA = torch.device("cuda", 0)
LATE = 20_000_000  # cycles: about 10 ms


def subject(name: str) -> tuple[Stack, Tensor]:
    torch.manual_seed(0)
    with CUDA:
        return Stack(SHAPES[name].toy()), torch.randn(16, 64, 64)


def trained(model: nn.Module, called: Any, x: Tensor, steps: int = 3) -> list[Tensor]:
    """Losses and gradients of some steps."""
    facts = []
    for step in range(steps):
        model.zero_grad(set_to_none=True)
        loss = called(x * (step + 1))
        loss.backward()
        facts += [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    return facts


def equal(name: str, budget: int | str) -> tuple[bool, memgraph.Report]:
    plain, x = subject(name)
    model, _ = subject(name)
    ours = memgraph.compile(model, budget, lower=None)  # what Inductor compiles rounds in its own way
    found, expected = trained(model, ours, x), trained(plain, plain, x)
    return len(found) == len(expected) and all(map(torch.equal, found, expected)), ours.plan


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("share", [1.2, 0.7, 0.45])
def test_a_budget_is_kept_and_gradients_are_eagers(name: str, share: float) -> None:
    model, x = subject(name)
    free = memgraph.plan(model, x, budget="8GB", lower=None)
    there = sum(op.nbytes for op in free.forecast.trace.ops if op.is_input)
    same_as_eager, report = equal(name, there + int(share * (free.peak - there)))
    assert same_as_eager
    assert report.measured is not None and report.measured <= report.peak <= report.machine.budget


SLEEPING = [pytest.param(stream, marks=pytest.mark.kernels) for stream in ("out", "back", "compute")]


@pytest.mark.parametrize("plan", [given_up(Placement.OFFLOAD_BLOCKING), all_given_up], ids=["offload", "mixed"])
@pytest.mark.parametrize("late", [*SLEEPING, "none"])
def test_gradients_are_eagers_however_late_a_stream_is(plan: Any, late: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One stream sleeps before each of its copies, or before each of the others'."""
    monkeypatch.setattr(search, "make_plan", plan)
    copy = pinned_tier.PinnedLease._copy
    cuda: Any = torch.cuda
    out, back = pinned_tier.copy_streams(cuda, CUDA)

    def slow(lease: pinned_tier.PinnedLease, move: Any, stream: Any, into: Tensor, of: Tensor) -> Any:
        sleeper = torch.cuda.current_stream(CUDA) if late == "compute" else {"out": out, "back": back}.get(late)
        if sleeper is not None and (late == "compute" or sleeper is stream):
            with torch.cuda.stream(sleeper):
                torch.cuda._sleep(LATE)
        return copy(lease, move, stream, into, of)

    monkeypatch.setattr(pinned_tier.PinnedLease, "_copy", slow)
    same_as_eager, report = equal("gpt2-xl", "8GB")
    assert same_as_eager
    assert any(op.fn == "memgraph.offload.default" for op in report.forecast.trace.ops)


def test_the_block_is_pinned_and_no_step_takes_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "make_plan", given_up(Placement.OFFLOAD_BLOCKING))
    model, x = subject("gpt2-xl")
    ours = memgraph.compile(model, "8GB", lower=None)
    trained(model, ours, x)
    before = [id(block) for block in PINNED_POOL.free]
    assert (
        before
        and all(block.pinned and block.bytes.is_pinned() for block in PINNED_POOL.free)
        and not PINNED_POOL.in_use
    )
    trained(model, ours, x)
    assert [id(block) for block in PINNED_POOL.free] == before


@pytest.mark.kernels
def test_a_cast_equals_the_cpus_and_is_not_waited_for() -> None:
    link_bandwidth.measure_casts(CUDA)
    for count in (1, 1000, 1 << 22):
        x = hard(count).cpu()
        there = x.to(CUDA)
        thin = narrow(there)
        assert same(thin.cpu(), narrow(x)) and same(widen(thin).cpu(), widen(narrow(x)))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        from memgraph.kernels.cast import best_config

        if best_config("cast", CUDA, there.nbytes) is not None:
            narrow(there)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.kernels
@pytest.mark.parametrize("flushes", [True, False])
def test_the_buffer_that_flushes_the_cache_is_freed_and_in_no_workspace(
    flushes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For an op on 16 MB, which the cache holds."""
    found = list[tuple[float, float]]()

    def noted(run: Any, warm_us: float, *given: Any) -> float:
        found.append((warm_us, cold_us(run, warm_us, *given)))
        return found[0][1]

    monkeypatch.setenv("MEMGRAPH_CACHE", "")
    monkeypatch.setattr(op_profiler, "_known", {})
    monkeypatch.setattr(op_profiler, "cold_us", noted)
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(torch.ops.aten.relu.default, (x,))
    with FakeTensorMode():
        x.meta["val"], node.meta["val"] = (torch.empty(2 << 20, device=CUDA) for _ in range(2))
    cache, before = torch.cuda.get_device_properties(CUDA).L2_cache_size, torch.cuda.memory_allocated(CUDA)
    cost = OpProfiler(1 << 32, room=None if flushes else (16 << 20) + cache // 2)(node)
    ((warm_us, us),) = found
    assert (cost.us, cost.workspace) == (us, 0) and us >= warm_us > 0 and (flushes or us == warm_us)
    assert torch.cuda.memory_allocated(CUDA) == before
    assert (torch.cuda.max_memory_allocated(CUDA) - before >= FLUSHED * cache) is flushes
