"""What ranks tell each other about a step is gone, to the byte, when they have heard it.

Every way of it is tried in one start of two ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import memgraph
from memgraph.profile.memory_meter import measure_peak
from tests.support.ranks import on_ranks

TIMES = 300  # what a thread lets go of late is seen in some of them


def _left(rank: int) -> dict[str, int]:
    """Bytes that each way has left behind."""
    optimizer = memgraph.OSS([nn.Parameter(torch.ones(64))])
    exchange, near, bucket = optimizer.exchange, optimizer.neighbours, optimizer.pieces.laid[0].bucket
    ways: dict[str, Callable[[], object]] = {
        "most": lambda: exchange.most(torch.zeros(3, dtype=torch.int32)),
        "each": lambda: exchange.each(torch.zeros(3)),
    }
    if near is not None:
        ways |= {"packed": lambda: near.packed(bucket, torch.ones(64))(), "meet": lambda: near.meet("a meeting")}
    return {name: _net(way) for name, way in ways.items()}


def _net(way: Callable[[], object]) -> int:
    def often() -> None:
        for _ in range(TIMES):
            way()

    _, allocation = measure_peak(often)
    assert allocation is not None
    return allocation.net


def test_numbers_that_ranks_have_told_each_other_leave_no_bytes() -> None:
    first, second = on_ranks(2, _left)
    assert set(first.values()) | set(second.values()) == {0}, (first, second)


def _told(rank: int) -> list[object]:
    exchange = memgraph.OSS([nn.Parameter(torch.ones(8))]).exchange
    kept = torch.tensor([rank, 5, -rank])
    found: list[object] = [exchange.most(kept) is kept, kept.tolist(), exchange.each(torch.tensor([rank, 7])).tolist()]
    return [*found, exchange.most(torch.tensor([1.0, torch.nan if rank == 1 else 0.0])).isnan().tolist()]


def test_every_rank_hears_the_numbers_of_all() -> None:
    assert on_ranks(3, _told) == [[True, [2, 5, 0], [[0, 7], [1, 7], [2, 7]], [False, True]]] * 3
