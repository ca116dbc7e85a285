"""Leases of one tier are separate, return their files, and reference a tensor for as long as its copy runs."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from memgraph.storage.file_tier import FileTier
from memgraph.storage.io_threads import WORKERS
from memgraph.storage.spill_file import PAGE
from tests.support.slow_disk import MANY, Gate, drain, noise, round_trip


def test_leases_do_not_meet(folder: Path) -> None:
    tier = FileTier([MANY, 100], folder)
    leases, sent = [tier.lease() for _ in range(4)], [noise(MANY) for _ in range(4)]
    for lease, tensor in zip(leases, sent, strict=True):
        lease.offload(0, tensor)
    for lease, tensor in zip(leases, sent, strict=True):
        back = torch.empty_like(tensor)
        lease.reload(0, back)
        lease.wait(0)
        assert torch.equal(back, tensor)


def test_a_released_file_is_used_again(folder: Path) -> None:
    tier = FileTier([100], folder)
    first, second = tier.lease(), tier.lease()
    rooms = {first.file, second.file}
    first.release()
    first.release()
    second.release()
    assert len(rooms) == 2
    assert {lease.file for lease in [tier.lease(), tier.lease()]} == rooms


def test_a_released_lease_does_nothing_more(folder: Path) -> None:
    lease = FileTier([4], folder).lease()
    lease.release()
    with pytest.raises(ValueError, match="this lease is released"):
        lease.offload(0, torch.zeros(1))


def test_a_forgotten_lease_returns_its_file(folder: Path) -> None:
    tier = FileTier([MANY], folder)
    lease = tier.lease()
    room = lease.file
    lease.offload(0, noise(MANY))
    lease.free(0)
    del lease
    assert tier.files == [room]


def test_a_tensor_is_referenced_until_its_copy_has_ended_and_no_longer(folder: Path) -> None:
    lease = FileTier([MANY], folder).lease()
    sent = noise(MANY)
    seen = weakref.ref(sent)
    lease.offload(0, sent)
    del sent
    assert seen() is not None
    lease.free(0)
    assert seen() is None

    back = torch.empty(MANY, dtype=torch.uint8)
    seen = weakref.ref(back)
    lease.reload(0, back)
    lease.wait(0)
    del back
    assert seen() is None


def test_a_lease_that_is_dropped_in_the_middle_keeps_the_tensor_for_the_workers(folder: Path, gate: Gate) -> None:
    tier = FileTier([MANY], folder)
    lease, sent = tier.lease(), noise(MANY)
    room, seen = lease.file, weakref.ref(sent)
    lease.offload(0, sent)
    assert gate.reached.wait(60)
    del lease, sent
    gc.collect()
    assert seen() is not None
    gate.opened.set()
    drain()
    assert seen() is None
    assert tier.lease().file == room


def test_a_lease_that_the_collector_releases_in_an_io_thread_returns_its_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = FileTier([MANY], folder)
    leases, pwritev = [tier.lease()], os.pwritev
    room = leases[0].file

    def release(*place: Any) -> int:
        for lease in leases:
            lease.release()
        return pwritev(*place)

    monkeypatch.setattr(os, "pwritev", release)
    leases[0].offload(0, noise(MANY))
    drain()
    assert not tier.files
    leases.clear()
    assert tier.lease().file == room


def test_release_waits_for_what_runs_and_drops_what_does_not(folder: Path, gate: Gate) -> None:
    tier = FileTier([PAGE] * 5, folder)
    lease, sent = tier.lease(), [noise(PAGE) for _ in range(5)]
    for slot, tensor in enumerate(sent):
        lease.offload(slot, tensor)
        lease.reload(slot, tensor)
    assert gate.reached.wait(60)
    release = threading.Thread(target=lease.release)
    release.start()
    while not lease.dropped:
        time.sleep(0.001)
    assert release.is_alive()
    assert not tier.files
    gate.opened.set()
    release.join()
    assert len(tier.files) == 1
    written = gate.written
    drain()
    assert 0 < written == gate.written <= WORKERS * PAGE


def test_release_works_after_an_interrupt(folder: Path, gate: Gate) -> None:
    tier = FileTier([MANY], folder)
    lease, sent = tier.lease(), noise(MANY)
    lease.offload(0, sent)
    waiting, main = threading.Event(), threading.get_ident()

    def interrupt() -> None:
        assert waiting.wait(60)
        signal.pthread_kill(main, signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        waiting.set()
        lease.free(0)
    interrupter.join()
    gate.opened.set()
    lease.release()
    assert torch.equal(round_trip(tier.lease(), 0, sent), sent)
