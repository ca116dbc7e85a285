"""Pinned memory is allocated as it is needed, shared by steps, and bounded by its cap."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor

from memgraph.errors import MemgraphError
from memgraph.profile import machine_profile
from memgraph.profile.link_bandwidth import Link
from memgraph.storage.pinned_pool import PinnedError, PinnedPool, cap_nbytes
from memgraph.storage.pinned_tier import PinnedTier
from memgraph.storage.spill_file import PAGE
from passes import Machine
from tests.support.late_device import Late, Pinned

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class Counted(Pinned):
    """Knows what is pinned; refuses more than `limit`."""

    def __init__(self, limit: int = 1 << 40) -> None:
        self.limit, self.there = limit, dict[int, int]()

    def register(self, flat: Tensor, device: torch.device) -> str:
        if sum(self.there.values()) + flat.nbytes > self.limit:
            return "no more locked memory"
        self.there[flat.data_ptr()] = flat.nbytes
        return ""

    def unregister(self, flat: Tensor) -> None:
        del self.there[flat.data_ptr()]


def some(cap: int = 1 << 30, limit: int = 1 << 40) -> tuple[PinnedPool, Counted]:
    pins = Counted(limit)
    return PinnedPool(lambda: cap, pins), pins


def test_a_block_is_whole_pages_and_no_more() -> None:
    pool, pins = some()
    pool.reserve(5 * PAGE + 1, CPU)
    assert list(pins.there.values()) == [6 * PAGE] and pool.nbytes == 6 * PAGE
    assert pool.acquire(PAGE, CPU).bytes.data_ptr() % PAGE == 0


def test_a_plan_that_offloads_only_empty_values_has_a_block_too() -> None:
    pool, pins = some()
    lease = PinnedTier([0, 0], CPU, Late(0), pool).lease()
    lease.offload(1, torch.empty(0))
    lease.free(1)
    assert list(pins.there.values()) == [PAGE]


def test_a_child_process_does_not_inherit_a_block() -> None:
    pool, _ = some()
    block = pool.acquire(PAGE, CPU)
    address = block.bytes.data_ptr()
    spans = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    begin = next(low for low, high in spans if int(low, 16) <= address < int(high, 16))
    flags = Path("/proc/self/smaps").read_text().partition(f"{begin}-")[2].partition("VmFlags:")[2].splitlines()[0]
    assert "dc" in flags.split()  # do not copy area on fork


def test_plans_share_a_block_that_is_large_enough_for_each() -> None:
    pool, pins = some()
    for nbytes in (3 * PAGE, 8 * PAGE, 2 * PAGE):
        pool.reserve(nbytes, CPU)
    assert list(pins.there.values()) == [8 * PAGE]
    for nbytes in (2 * PAGE, 8 * PAGE, 3 * PAGE):
        block = pool.acquire(nbytes, CPU)
        assert block.nbytes == 8 * PAGE
        pool.release(block)
    pool.unreserve(8 * PAGE, CPU)
    assert not pins.there
    assert pool.acquire(3 * PAGE, CPU).nbytes == 3 * PAGE


def test_two_runs_have_two_blocks() -> None:
    pool, pins = some()
    pool.reserve(PAGE, CPU)
    first, second = pool.acquire(PAGE, CPU), pool.acquire(PAGE, CPU)
    assert first is not second and len(pins.there) == 2
    pool.release(first)
    pool.release(second)
    pool.unreserve(PAGE, CPU)
    assert not pins.there


def test_a_block_of_one_device_is_not_used_for_another() -> None:
    pool, _ = some()
    pool.reserve(PAGE, GPU)
    assert pool.acquire(PAGE, CPU).device == CPU and pool.acquire(PAGE, GPU).device == GPU


def test_beyond_the_cap_is_an_error_of_its_own() -> None:
    pool, pins = some(cap=3 * PAGE)
    pool.reserve(2 * PAGE, CPU)
    block = pool.acquire(2 * PAGE, CPU)
    with pytest.raises(PinnedError, match=r"8192 bytes .* but 8192 are taken \(by 1 running steps\) and 12288 allow"):
        pool.acquire(2 * PAGE, CPU)
    pool.release(block)
    pool.reserve(3 * PAGE, CPU)
    assert pool.acquire(3 * PAGE, CPU).nbytes == 3 * PAGE and list(pins.there.values()) == [3 * PAGE]
    assert issubclass(PinnedError, MemgraphError)


def test_where_the_host_does_not_pin_copies_go_to_pageable_memory_after_a_warning() -> None:
    pool, pins = some(limit=0)
    with pytest.warns(RuntimeWarning, match=r"can't be pinned \(no more locked memory\), .*ulimit -l"):
        tier = PinnedTier([400, 400], CPU, Late(0), pool)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lease = tier.lease()
    x, back = torch.randn(100), torch.empty(100)
    lease.offload(1, x)
    lease.free(1)
    lease.reload(1, back)
    lease.wait(1)
    assert torch.equal(x, back) and not pins.there
    lease.release()
    tier.close()
    tier.close()
    assert pool.nbytes == 0


def test_slots_do_not_meet_and_keep_strides() -> None:
    pool, _ = some()
    lease = PinnedTier([4, 300, 0, 1200], CPU, Late(0), pool).lease()
    sent = [torch.randn(1), torch.randn(5, 15).t(), torch.randn(0), torch.randn(10, 30)]
    for slot, x in enumerate(sent):
        lease.offload(slot, x)
    for slot, x in enumerate(sent):
        lease.free(slot)
        back = torch.empty_like(x)
        lease.reload(slot, back)
        lease.wait(slot)
        assert torch.equal(back, x) and back.stride() == x.stride()
    assert lease.block is not None and lease.block.nbytes == PAGE


def test_a_slot_has_one_view_for_both_copies_until_its_layout_differs() -> None:
    pool, _ = some()
    lease = PinnedTier([300], CPU, Late(0), pool).lease()
    x, back, turned = torch.randn(5, 15), torch.empty(5, 15), torch.empty(15, 5).t()
    lease.offload(0, x)
    view = lease.views[0]
    lease.free(0)
    lease.reload(0, back)
    assert lease.views[0] is view and torch.equal(back, x)
    lease.wait(0)
    lease.offload(0, turned.copy_(x))
    lease.free(0)
    assert lease.views[0] is not view and lease.views[0].stride() == turned.stride()
    lease.reload(0, back)  # in another layout, whose elements lie elsewhere
    assert torch.equal(back, turned.t().reshape(5, 15))
    lease.wait(0)
    lease.bind({})
    assert not lease.views
    lease.release()


def test_a_dropped_tier_gives_up_its_block_and_a_lease_keeps_its_own() -> None:
    pool, pins = some()
    tier = PinnedTier([400], CPU, Late(0), pool)
    lease = tier.lease()
    tier.close()
    assert pins.there
    lease.release()
    assert not pins.there and pool.nbytes == 0
    tier = PinnedTier([400], CPU, Late(0), pool)
    assert pins.there
    del tier
    assert not pins.there


def test_the_cap_is_half_of_the_host_or_what_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEMGRAPH_PINNED", raising=False)
    assert 0 < cap_nbytes() <= os.sysconf("SC_PHYS_PAGES") * PAGE // 2
    monkeypatch.setenv("MEMGRAPH_PINNED", "64MB")
    assert cap_nbytes() == 64_000_000
    monkeypatch.setenv("MEMGRAPH_PINNED", "64 apples")
    with pytest.raises(ValueError, match="MEMGRAPH_PINNED='64 apples' can't be read; write "):
        cap_nbytes()


def test_a_plan_sends_no_more_to_the_host_than_may_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMGRAPH_PINNED", "64MB")
    link = Link(((1000, 1.0),))
    monkeypatch.setattr(machine_profile, "measure_host", lambda device, room: (link, link))
    machine = machine_profile.measure_links(Machine(1 << 30, "cuda:0"), "host", GPU, None)
    slots = [70_000] * (machine.link.capacity // 70_000)
    assert sum(-(-slot // 256) * 256 for slot in slots) <= 64_000_000 < machine.link.capacity * 1.02
