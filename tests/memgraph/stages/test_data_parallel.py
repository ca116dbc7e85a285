"""Pipelines beside each other, on a device mesh: gradients are averaged over the replicas, with or without OSS."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import memgraph
from tests.support.ranks import on_ranks
from tests.support.staged_models import in_turn, made

STEPS = 3


def _trained(rank: int, sharded: bool) -> list[str]:
    """Return the parameters of this rank that differ from those of eager, after some steps on two halves of the batch."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "stage"))
    model, batch = made("gpt2", 8)
    plain, _ = made("gpt2", 8)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    replica = mesh.get_local_rank("data")
    own = {key: value.chunk(2)[replica] for key, value in batch.items()}
    pipe = memgraph.pipeline(model, "1GB", 2, group=mesh.get_group("stage"))
    pipe.prepare(**own)
    parameters, group = list(pipe.parameters()), mesh.get_group("data")
    optimizer: torch.optim.Optimizer = (
        memgraph.OSS(parameters, torch.optim.AdamW, lr=1e-2, group=group)
        if sharded
        else torch.optim.AdamW(parameters, lr=1e-2)
    )
    for _ in range(STEPS):
        pipe.step(**own)
        if not sharded:
            for parameter in parameters:
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad, group=group)
                parameter.grad /= 2
        optimizer.step()
        optimizer.zero_grad()
        _step(plain, batch, reference)
    known = dict(plain.named_parameters())
    return [name for name, parameter in pipe.named_parameters() if not torch.equal(parameter, known[name])]


def _step(plain: nn.Module, batch: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
    """Update by the mean of the gradients of both halves."""
    halves = [in_turn(plain, {key: value.chunk(2)[i] for key, value in batch.items()}, 2)[0] for i in range(2)]
    for parameter, first, second in zip(plain.parameters(), *(each.parameters() for each in halves), strict=True):
        assert first.grad is not None and second.grad is not None
        parameter.grad = (first.grad + second.grad) / 2
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("sharded", [False, True])
def test_replicas_of_a_pipeline_train_as_eager_on_the_whole_batch(sharded: bool) -> None:
    assert on_ranks(4, _trained, sharded) == [[]] * 4
