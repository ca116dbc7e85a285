"""Numbers that ranks exchange leave no bytes behind."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import memgraph
from memgraph.profile.memory_meter import measure_peak
from tests.support.ranks import on_ranks

TIMES = 300  # a thread that frees late is seen in some of them


def _leftover_bytes(rank: int) -> dict[str, int]:
    """Return the bytes that each exchange has left behind."""
    optimizer = memgraph.OSS([nn.Parameter(torch.ones(64))])
    comm, bucket = optimizer.comm, optimizer.layout.buckets[0].bucket
    ways: dict[str, Callable[[], object]] = {
        "maximum": lambda: comm.maximum(torch.zeros(3, dtype=torch.int32)),
        "all_gather": lambda: comm.all_gather(torch.zeros(3)),
    }
    if (reader := comm.shared_memory) is not None:
        ways["packed"] = lambda: reader.reduce_packed(bucket, torch.ones(64))()
        ways["meet"] = lambda: reader.meet("a meeting")
    return {name: _net(way) for name, way in ways.items()}


def _net(way: Callable[[], object]) -> int:
    def often() -> None:
        for _ in range(TIMES):
            way()

    _, allocation = measure_peak(often)
    assert allocation is not None
    return allocation.net


@pytest.mark.long
def test_numbers_that_ranks_exchange_leave_no_bytes() -> None:
    first, second = on_ranks(2, _leftover_bytes)
    assert set(first.values()) | set(second.values()) == {0}, (first, second)


def _exchanged(rank: int) -> list[object]:
    comm = memgraph.OSS([nn.Parameter(torch.ones(8))]).comm
    kept = torch.tensor([rank, 5, -rank])
    found: list[object] = [comm.maximum(kept) is kept, kept.tolist(), comm.all_gather(torch.tensor([rank, 7])).tolist()]
    return [*found, comm.maximum(torch.tensor([1.0, torch.nan if rank == 1 else 0.0])).isnan().tolist()]


def test_every_rank_receives_the_numbers_of_all() -> None:
    assert on_ranks(3, _exchanged) == [[True, [2, 5, 0], [[0, 7], [1, 7], [2, 7]], [False, True]]] * 3
