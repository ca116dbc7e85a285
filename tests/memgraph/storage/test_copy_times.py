"""Links are as fast as a step finds them: on a disk both directions share it, behind a GPU each has its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest
import torch
from torch import nn

import memgraph
from memgraph.planning import assembly, search
from memgraph.storage.async_copy import CopyLog, copy_rates
from memgraph.storage.io_threads import read, write
from memgraph.storage.pinned_pool import PinnedPool
from memgraph.storage.pinned_tier import PinnedLease, PinnedTier
from passes.schedule.schedule import Placement
from tests.support.forced_plans import given_up
from tests.support.late_device import Pinned

CPU = torch.device("cpu")
MB = 1 << 20


@dataclass(frozen=True)
class Times:
    """A copy of so many bytes, in seconds."""

    started: float
    ended: float
    nbytes: int


@pytest.mark.parametrize(("half_duplex", "expected"), [(True, (50.0, 100.0)), (False, (25.0, 50.0))])
def test_directions_share_the_time_of_a_half_duplex_link(half_duplex: bool, expected: tuple[float, float]) -> None:
    """4 s out and back at the same time, of 100 and 200 MB."""
    log: CopyLog = {write: [Times(1.0, 5.0, 100_000_000)], read: [Times(1.0, 5.0, 200_000_000)]}
    assert copy_rates(log, half_duplex=half_duplex) == expected


class Clock:
    """torch.cuda with streams whose work takes a millisecond for each event."""

    def __init__(self) -> None:
        self.ms = count()

    def Stream(self, device: torch.device) -> Any:
        return self

    def current_stream(self, device: torch.device) -> Any:
        return self

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        yield

    def wait_stream(self, other: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def Event(self, enable_timing: bool = False) -> Event:
        return Event(self, enable_timing)


class Event:
    def __init__(self, clock: Clock, is_timed: bool) -> None:
        self.clock, self.is_timed = clock, is_timed

    def record(self, stream: Any) -> None:
        self.at = next(self.clock.ms)

    def synchronize(self) -> None:
        assert self.at >= 0

    def elapsed_time(self, other: Event) -> float:
        assert self.is_timed and other.is_timed, "torch has times of events that were made for it only"
        return other.at - self.at


def copied(is_timed: bool) -> PinnedLease:
    lease = PinnedTier([MB, MB], CPU, Clock(), PinnedPool(lambda: 1 << 30, Pinned())).lease()
    if is_timed:
        lease.time_copies()
    values = torch.zeros(MB, dtype=torch.uint8)
    for slot in (0, 1):
        lease.offload(slot, values)
        lease.free(slot)
    lease.reload(0, values)
    lease.wait(0)
    return lease


def test_a_timed_run_has_the_times_of_its_copies() -> None:
    lease = copied(is_timed=True)
    assert [each.nbytes for each in (*lease.copies[write], *lease.copies[read])] == [MB, MB, MB]
    assert copy_rates(lease.copies, half_duplex=False) == (MB / 1e3, MB / 1e3)
    lease.release()


def test_another_run_has_none() -> None:
    lease = copied(is_timed=False)
    assert copy_rates(lease.copies, half_duplex=False) == (0.0, 0.0)
    lease.release()


def test_the_timed_step_has_the_rates_of_its_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = PinnedPool(lambda: 1 << 30, Pinned())
    monkeypatch.setattr(search, "make_plan", given_up(Placement.OFFLOAD_BLOCKING))
    monkeypatch.setattr(assembly, "open_tier", lambda device, slots, *_: PinnedTier(slots, device, Clock(), pool))
    model = nn.Sequential(nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 1))
    ours = memgraph.compile(model, "1GB")
    for _ in range(2):  # measured, then timed
        model.zero_grad()
        ours(torch.ones(300, 48)).sum().backward()
    times = ours._latest.times
    assert times is not None and all(rate > 0 for rate in times.rates(half_duplex=False))
