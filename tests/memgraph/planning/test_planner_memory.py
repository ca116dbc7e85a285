"""Planning keeps to the budget too, where it can; what cannot be is said."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memgraph
from memgraph.planning import pricing
from memgraph.profile import link_bandwidth, machine_profile, op_profiler
from memgraph.profile.link_bandwidth import SIZES, measure_files
from memgraph.profile.memory_meter import resident_bytes
from memgraph.storage.file_tier import FileTier
from memgraph.storage.io_threads import STAGING
from memgraph.system.timer import CACHE, flush_caches
from memgraph.tensors.parameter_groups import state_tensors
from tests.support.planning_memory import anonymous_nbytes


@pytest.mark.long
def test_a_process_that_plans_keeps_its_anonymous_memory_within_the_budget(tmp_path: Path) -> None:
    """Measured by the kernel, and with nothing known before."""
    command = [sys.executable, "-m", "tests.support.planning_memory", str(tmp_path)]
    ran = subprocess.run(command, env={**os.environ, "MEMGRAPH_CACHE": ""}, capture_output=True, text=True, check=True)
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["there"] + found["grown"] <= found["budget"]
    assert found["grown"] > (4 << 20)  # it has run ops


def test_caches_are_emptied_without_memory_of_the_process() -> None:
    begin = anonymous_nbytes()
    empty = flush_caches(torch.device("cpu"))
    empty()
    assert anonymous_nbytes() - begin < CACHE // 8


@pytest.mark.parametrize("room", [1 << 20, 10 << 20, 70 << 20, None])
def test_the_disk_is_measured_in_the_room_there_is(
    room: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, ...]] = []

    def copied(tier: FileTier) -> tuple[float, float]:
        seen.append(tier.slots)
        return 1.0, 1.0

    monkeypatch.setenv("MEMGRAPH_CACHE", "")
    monkeypatch.setattr(link_bandwidth, "_known", {})
    monkeypatch.setattr(link_bandwidth, "_copied", copied)
    measure_files(tmp_path, room)
    if room is None:
        assert seen == [(nbytes,) * count for nbytes, count in SIZES.items()]
    else:
        assert all(sum(slots) + slots[0] + STAGING <= room for slots in seen) or seen == [(min(SIZES),)]
    assert len(seen) == {1: 1, 10: 2, 70: 3}.get((room or 70 << 20) >> 20)


@pytest.mark.long
@pytest.mark.parametrize("beyond", [False, True])
def test_a_model_beyond_the_budget_gives_a_share_of_itself_to_measure_the_disk(
    beyond: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms: list[int | None] = []

    def disk(folder: object, room: int | None) -> link_bandwidth.Links:
        rooms.append(room)
        return measure_files(None, room)

    monkeypatch.setattr(machine_profile, "measure_files", disk)
    frozen = [nn.Linear(512, 512).requires_grad_(False) for _ in range(4)]  # offloaded whole on every processor
    model, x = nn.Sequential(nn.Linear(64, 512), nn.GELU(), *frozen), torch.randn(64, 64)
    there = resident_bytes([*model.parameters(), x])
    with contextlib.suppress(memgraph.BudgetError):
        memgraph.plan(model, x, budget=there - 1_000_000 if beyond else there + 100, time_limit=0.1)
    assert {room for room in rooms if room} == {(there // 16 if beyond else 100) // 2}  # 0 where no plan can fit


class Frozen(nn.Module):
    """A weight that is large beside all else, and has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(512, 512).requires_grad_(False), nn.Linear(512, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu().sin().cos()).square().mean()


def warnings_of_a_plan(budget: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the warnings that are logged while a step is planned without cached prices."""
    monkeypatch.setattr(op_profiler, "_known", {})
    caplog.clear()
    with caplog.at_level(logging.WARNING, "memgraph"):
        memgraph.plan(Frozen(), torch.randn(64, 512), budget=budget, offload=None)
    return [record.getMessage() for record in caplog.records if record.name.startswith("memgraph")]


def test_an_op_that_is_more_than_the_budget_leaves_is_named_in_the_log_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MEMGRAPH_CACHE", "")
    assert not warnings_of_a_plan(4 << 20, monkeypatch, caplog)
    (said,) = warnings_of_a_plan(2 << 20, monkeypatch, caplog)
    assert "planning goes beyond the budget: aten." in said and "MEMGRAPH_CACHE" in said


@torch.library.custom_op("memgraph_planner_memory::worked", mutates_args=())
def worked(x: Tensor) -> Tensor:
    return x.repeat(64, 1)[: len(x)].clone()


@worked.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


worked.register_autograd(lambda ctx, grad: grad)


class Working(nn.Module):
    """An op whose tensors are small, and whose workspace is not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return worked(self.linear(x)).sum()


@pytest.mark.long
def test_an_op_whose_workspace_is_more_than_the_budget_leaves_is_named_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MEMGRAPH_CACHE", "")
    monkeypatch.setattr(op_profiler, "_known", {})
    with caplog.at_level(logging.WARNING, "memgraph"), pytest.raises(memgraph.BudgetError):
        memgraph.plan(Working(), torch.randn(64, 64), budget=1 << 20, offload=None)
    (said,) = (record.getMessage() for record in caplog.records if record.name.startswith("memgraph"))
    assert "memgraph_planner_memory.worked.default, which is run to be priced, takes 1.1 MB" in said


@pytest.mark.long
@pytest.mark.parametrize("adds", [False, True])
def test_an_op_has_the_room_that_gradients_and_states_of_earlier_steps_leave(
    adds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms: list[int | None] = []

    class Seen(op_profiler.OpProfiler):
        def __init__(self, limit: int, room: int | None = None, *rest: Any, **named: Any) -> None:
            super().__init__(limit, room, *rest, **named)
            rooms.append(room)

    monkeypatch.setattr(pricing, "OpProfiler", Seen)
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters())
    compiled = memgraph.compile(model, "1MB", optimizer=optimizer, loss=lambda y: y.square().mean())
    compiled(torch.randn(32, 16)).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=not adds)
    x = torch.randn(24, 16)
    held = [p.grad for p in model.parameters() if p.grad is not None]
    there = resident_bytes([*model.parameters(), *held, *state_tensors(optimizer), x])
    rooms.clear()
    compiled(x)
    assert set(rooms) == {1_000_000 - there}


def test_what_was_priced_elsewhere_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MEMGRAPH_CACHE", str(tmp_path))
    warnings_of_a_plan(2 << 20, monkeypatch, caplog)
    assert not warnings_of_a_plan(2 << 20, monkeypatch, caplog)
