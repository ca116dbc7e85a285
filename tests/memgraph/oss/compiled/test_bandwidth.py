"""The network is measured within what the budget of a rank leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import memgraph
from memgraph.oss.compiled.joint_planning import JointPlanner
from memgraph.planning import ranks
from memgraph.planning.ranks import LARGE, LEAST, measure_network
from memgraph.profile.memory_meter import measure_peak
from passes import Machine
from tests.support.ranks import on_ranks


def _measured(rank: int, rooms: tuple[int, int]) -> tuple[int, float]:
    """Return the peak bytes of a measurement in the room of this rank, and the rate that it found."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMGRAPH_CACHE", "")
        patch.setattr(ranks, "_speeds", {})
        optimizer: Any = memgraph.OSS(nn.Linear(8, 8).parameters(), torch.optim.SGD, lr=0.1)
        planner = JointPlanner(optimizer.comm, torch.device("cpu"))
        found, allocated = measure_peak(lambda: measure_network(Machine(1 << 30), optimizer, planner, rooms[rank]))
    assert allocated is not None
    return allocated.peak, found.network.rate


@pytest.mark.parametrize(
    "rooms", [(1 << 30, 1 << 30), (1 << 30, 600_000), (-1, 5)], ids=["all", "one has less", "none"]
)
def test_the_least_room_of_all_ranks_is_kept(rooms: tuple[int, int]) -> None:
    for peak, rate in on_ranks(2, _measured, rooms):
        assert peak <= max(min(*rooms), 4 * LEAST) and peak <= 4 * LARGE
        assert rate > 0
