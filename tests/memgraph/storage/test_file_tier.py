"""Values that are offloaded to disk are reloaded unchanged, whatever their dtype, size and layout."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memgraph.storage.file_tier import FileTier
from memgraph.storage.io_threads import CHUNK, STAGING, WORKERS
from memgraph.storage.spill_file import PAGE
from tests.support.slow_disk import MANY, noise, round_trip

DTYPES = [torch.uint8, torch.bool, torch.int64, torch.bfloat16, torch.float16, torch.float32, torch.complex64]
EDGES = [0, 1, PAGE - 1, PAGE, PAGE + 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1, MANY]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(EDGES) | st.integers(0, MANY), max_size=6))
def test_what_comes_back_is_what_went_out(folder: Path, sizes: list[int]) -> None:
    tier = FileTier(sizes, folder)
    lease = tier.lease()
    sent = [noise(nbytes) for nbytes in sizes]
    for slot, tensor in enumerate(sent):
        lease.offload(slot, tensor)
    back = [torch.empty_like(tensor) for tensor in sent]
    for slot in reversed(range(len(sizes))):  # as backward does; the reload waits for the copy out by itself
        lease.reload(slot, back[slot])
    for slot in reversed(range(len(sizes))):
        lease.wait(slot)
    assert all(map(torch.equal, sent, back))
    lease.release()
    tier.close()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [0, 1, 1023, 70001])
def test_every_dtype_travels(folder: Path, dtype: torch.dtype, count: int) -> None:
    sent = (noise(count * dtype.itemsize) & 1).view(dtype)
    lease = FileTier([sent.nbytes], folder).lease()
    assert raw(round_trip(lease, 0, sent)) == raw(sent)


@pytest.mark.parametrize(
    "sent",
    [
        torch.randn(64, 48).t(),
        torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),
        torch.randn(9, 100)[3:5],
        torch.tensor(3.0),
        torch.randn(4, 0, 3),
    ],
    ids=["transposed", "channels last", "inside a storage", "scalar", "empty"],
)
def test_any_dense_layout_travels(folder: Path, sent: torch.Tensor) -> None:
    lease = FileTier([sent.nbytes], folder).lease()
    assert torch.equal(round_trip(lease, 0, sent), sent)


def test_a_copy_back_stays_within_its_tensor(folder: Path) -> None:
    lease = FileTier([5000], folder).lease()
    lease.offload(0, torch.ones(5000, dtype=torch.uint8))
    around = torch.zeros(10000, dtype=torch.uint8)
    lease.reload(0, around[2500:7500])
    lease.wait(0)
    assert around[2500:7500].all()
    assert not around[:2500].any()
    assert not around[7500:].any()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(99),
        torch.empty(101),
        torch.empty(200)[::2],
        torch.empty(1).expand(100),
        torch.empty(100, device="meta"),
    ],
    ids=["short", "long", "strided", "expanded", "meta"],
)
def test_what_is_not_one_run_of_the_slots_bytes_is_refused(folder: Path, tensor: torch.Tensor) -> None:
    lease = FileTier([400], folder).lease()
    with pytest.raises(ValueError, match="a slot of 400 bytes takes a dense CPU tensor"):
        lease.offload(0, tensor)


def test_a_slot_that_holds_nothing_is_refused(folder: Path) -> None:
    lease = FileTier([4, 4], folder).lease()
    lease.offload(0, torch.zeros(1))
    with pytest.raises(ValueError, match=r"slot 1 was not offloaded in this lease; those that were: \[0\]"):
        lease.reload(1, torch.zeros(1))
    with pytest.raises(ValueError, match="slot 0 was not reloaded"):
        lease.wait(0)


def test_the_copies_of_a_slot_take_turns(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv

    def slow(*place: Any) -> int:
        time.sleep(0.01)
        return preadv(*place)

    monkeypatch.setattr(os, "preadv", slow)
    lease = FileTier([MANY], folder).lease()
    for _ in range(2):
        sent, once, again = noise(MANY), torch.zeros(MANY, dtype=torch.uint8), torch.zeros(MANY, dtype=torch.uint8)
        lease.offload(0, sent)
        lease.reload(0, once)
        lease.reload(0, again)
        assert torch.equal(once, sent)
        lease.offload(0, noise(MANY))
        assert torch.equal(again, sent)


def test_short_reads_and_writes_are_completed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = {name: getattr(os, name) for name in ("preadv", "pwritev")}
    for name, call in whole.items():
        monkeypatch.setattr(os, name, lambda file, views, at, call=call: call(file, [views[0][: 3 * PAGE]], at))
    lease, sent = FileTier([MANY], folder).lease(), noise(MANY)
    assert torch.equal(round_trip(lease, 0, sent), sent)


def test_the_tiers_of_a_process_share_their_buffers(folder: Path) -> None:
    tiers = [FileTier([MANY], folder) for _ in range(3)]
    assert {tier.staging for tier in tiers} == {STAGING}
    sent = noise(MANY)
    assert all(torch.equal(round_trip(tier.lease(), 0, sent), sent) for tier in tiers)
    assert sum(thread.name.startswith("memgraph-disk") for thread in threading.enumerate()) == WORKERS


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.flatten().view(torch.uint8).numpy().tobytes()
