"""Ranks compare their steps between hosts, whatever carries their buckets, so that no GPU is waited for."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import memgraph
from memgraph import AgreementError
from memgraph.oss.comm import watchdog
from memgraph.oss.comm.consensus import GATHER, NEW, check_same_step
from memgraph.oss.comm.rank_group import RankGroup
from memgraph.oss.comm.watchdog import CollectiveWatchdog
from tests.support.ranks import on_ranks


def _compared(rank: int) -> tuple[list[str], bool]:
    """Compare steps as ranks do whose buckets do not go by gloo."""
    plain, watchdog._is_gloo = watchdog._is_gloo, lambda group: False
    try:
        ranks = RankGroup(CollectiveWatchdog(dist.group.WORLD))  # type: ignore[arg-type]
        is_apart = ranks.watchdog.host_group is not ranks.watchdog.group
    finally:
        watchdog._is_gloo = plain
    errors = []
    for step in (NEW, NEW + rank * GATHER, NEW):
        try:
            check_same_step(ranks, step)()
        except AgreementError as error:
            errors.append(str(error))
    return errors, is_apart and ranks.watchdog.host_group is ranks.watchdog.host_group


def test_ranks_of_another_backend_compare_their_steps_in_a_group_of_hosts() -> None:
    first, second = on_ranks(2, _compared)
    assert first[1] and second[1]
    assert [len(errors) for errors, _ in (first, second)] == [1, 1]
    assert first[0][0].startswith("rank 0 is about to run a new kind of call; ranks [1] run something else")


def _groups(rank: int) -> bool:
    optimizer = memgraph.OSS([nn.Parameter(torch.ones(64))])
    return optimizer.watchdog.host_group is optimizer.watchdog.group


def test_ranks_of_gloo_need_no_other_group() -> None:
    assert on_ranks(2, _groups) == [True, True]


def test_what_is_sent_lies_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[Tensor, Any]] = []

    def all_gather(rows: Sequence[Tensor], own: Tensor, group: Any, async_op: bool) -> Any:
        sent.append((own, group))
        for row in rows:
            row.copy_(own)
        return SimpleNamespace(wait=lambda limit: None)

    monkeypatch.setattr(dist, "all_gather", all_gather)
    found = CollectiveWatchdog.__new__(CollectiveWatchdog)
    vars(found).update(members=[0, 1], group="a GPU's", host_group="hosts'", is_gloo=False, limit=3.0)
    ranks: Any = SimpleNamespace(watchdog=found, rank=0)
    check_same_step(ranks, 5)()
    assert [(own.device.type, group) for own, group in sent] == [("cpu", "hosts'")]


@pytest.mark.parametrize("bound", [None, torch.device("cuda", 3)])
def test_small_tensors_of_a_gpus_group_are_on_the_device_that_it_is_bound_to(
    bound: torch.device | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    group: Any = SimpleNamespace(_device_types=[torch.device("cuda")], bound_device_id=bound)
    assert watchdog._device(group) == (bound or torch.device("cuda", 0))
