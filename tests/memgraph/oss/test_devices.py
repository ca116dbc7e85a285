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
    sharded = memgraph.OSS(tensors((5, 7), (3,)), optim.Adam)
    elsewhere = [nn.Parameter(torch.zeros(4)), nn.Parameter(torch.empty(6, device="meta"))]
    sharded.layout.add_group(0, {"params": elsewhere})
    for bucket in sharded.layout.buckets:
        assert len({sharded.layout.parameters[item].device for item in bucket.bucket.params}) == 1
    own = [piece.count for bucket in sharded.layout.buckets for piece, view in bucket.own if view.is_meta]
    assert own == [3]
    given = [nn.Parameter(torch.zeros(3, device="meta" if rank == 1 else "cpu"))]
    messages = [refusal(ShardError if rank == 1 else AgreementError, memgraph.OSS, given)]
    messages.append(refusal(ShardError, memgraph.OSS, nn.Linear(2, 3, device="meta").parameters()))
    return messages


def test_devices_share_no_bucket_and_the_meta_device_is_refused() -> None:
    first, own = on_ranks(2, _laid)
    assert own[0] == own[1] == first[1]
    assert own[0].startswith("parameter 0 of the group is on the meta device, where it has no values; give the module")
    assert f"ShardError: {own[0]} on rank 1" in first[0]
