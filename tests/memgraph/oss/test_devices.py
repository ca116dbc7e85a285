"""Parameters on several devices, and on one that has no memory."""

from __future__ import annotations

import torch
from torch import nn, optim

import memgraph
from memgraph import AgreementError, ShardError
from tests.memgraph.oss.checkpoint.test_full_state import refusal
from tests.memgraph.oss.test_gradients import tensors
from tests.support.ranks import on_ranks


def _laid(rank: int) -> list[str]:
    spread = memgraph.OSS(tensors((5, 7), (3,)), optim.Adam)
    elsewhere = [nn.Parameter(torch.zeros(4)), nn.Parameter(torch.empty(6, device="meta"))]
    spread.layout.add_group(0, {"params": elsewhere})
    for laid in spread.layout.buckets:
        assert len({spread.layout.parameters[item].device for item in laid.bucket.params}) == 1
    own = [piece.count for laid in spread.layout.buckets for piece, view in laid.own if view.is_meta]
    assert own == [3]
    given = [nn.Parameter(torch.zeros(3, device="meta" if rank == 1 else "cpu"))]
    said = [refusal(ShardError if rank == 1 else AgreementError, memgraph.OSS, given)]
    said.append(refusal(ShardError, memgraph.OSS, nn.Linear(2, 3, device="meta").parameters()))
    return said


def test_devices_share_no_bucket_and_one_without_memory_is_refused() -> None:
    first, own = on_ranks(2, _laid)
    assert own[0] == own[1] == first[1]
    assert own[0].startswith("parameter 0 of the group is on the meta device, where it has no values; give the module")
    assert f"ShardError: {own[0]} on rank 1" in first[0]
