"""Fixtures that patch plans, the sizes of windows, and the disk, and one that asks for a described device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.fake_cuda.described_device import is_described
from memgraph.optim import offloaded_update
from memgraph.planning import assembly, pricing, replan, search, target
from memgraph.storage.pinned_pool import PinnedPool
from memgraph.storage.pinned_storage import PinnedBufferAllocator
from memgraph.storage.pinned_tier import PinnedTier
from memgraph.storage.places import Places
from passes import Machine, make_plan
from passes.schedule.schedule import Placement
from tests.support.forced_plans import all_given_up, given_up
from tests.support.late_device import Late, Pinned
from tests.support.slow_disk import Gate


@pytest.fixture(name="given_up")
def _given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make plans that keep no value."""
    monkeypatch.setattr(search, "make_plan", all_given_up)


@pytest.fixture(params=["room", "tight"])
def room_or_tight(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test with plans that have room for everything, and with plans that keep no value."""
    monkeypatch.setattr(search, "make_plan", make_plan if request.param == "room" else all_given_up)


@pytest.fixture
def spilling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make plans that offload every value that can be offloaded."""
    monkeypatch.setattr(search, "make_plan", given_up(Placement.OFFLOAD_BLOCKING))


@pytest.fixture(params=[Placement.KEEP, Placement.OFFLOAD_BLOCKING, Placement.RECOMPUTE_PER_USE])
def fate(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Placement:
    """Make plans that have one placement for all values."""
    monkeypatch.setattr(search, "make_plan", given_up(request.param))
    chosen: Placement = request.param
    return chosen


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make windows small, so that a small update takes several."""
    monkeypatch.setattr(offloaded_update, "SMALLEST", 1 << 16)


@pytest.fixture(name="pool")
def _pool() -> PinnedPool:
    return PinnedPool(lambda: 1 << 30, Pinned())


@pytest.fixture(name="late")
def _late(monkeypatch: pytest.MonkeyPatch, pool: PinnedPool) -> Late:
    """Make a device of RAM with pinned memory behind it; tier and offloaded state are as on a GPU."""
    late = Late(0)

    def tier(device: torch.device, slots: Sequence[int], *_: Any) -> PinnedTier | None:
        return PinnedTier(slots, device, late, pool) if slots else None

    def linked(machine: Machine, *_: object) -> Machine:
        return replace(machine, tier="host", link=replace(machine.link, out=100.0, back=100.0, capacity=1 << 40))

    def places(tiers: Sequence[str], device: torch.device, *_: Any) -> Places:
        return Places({"host": PinnedBufferAllocator(device, late, pool)})

    monkeypatch.setattr(target, "open_places", places)
    monkeypatch.setattr(assembly, "open_tier", tier)
    monkeypatch.setattr(pricing, "measure_tiers", linked)
    monkeypatch.setattr(replan, "replanned", lambda *_: None)
    return late


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.opened.set()


@pytest.fixture
def described() -> None:
    if not is_described():
        pytest.fail("run these with `make fake-cuda`, which describes a device")
