"""Pipelines beside each other, on a device mesh: gradients are averaged over the replicas, with or without OSS."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

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
    first = memgraph.pipeline(made("gpt2", 8)[0], "1GB", 2, group=mesh.get_group("stage"))
    first.prepare(**own)
    group, balance = mesh.get_group("data"), [first._cut.cut.begins]
    dist.broadcast_object_list(balance, group=group, group_src=0)  # each pipeline has measured other times
    pipe = memgraph.pipeline(model, "1GB", 2, group=mesh.get_group("stage"), balance=balance[0])
    pipe.prepare(**own)
    parameters = list(pipe.parameters())
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


def _counted(rank: int) -> list[Any]:
    """Return what is wrong after some steps of an optimizer that the pipeline makes, and the bytes of its states."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "stage"))
    model, batch = made("gpt2", 8)
    plain, _ = made("gpt2", 8)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    replica, group = mesh.get_local_rank("data"), mesh.get_group("data")
    own = {key: value.chunk(2)[replica] for key, value in batch.items()}
    make = functools.partial(memgraph.OSS, optim=torch.optim.AdamW, lr=1e-2, group=group)
    whole = memgraph.pipeline(made("gpt2", 8)[0], "1GB", 2, group=mesh.get_group("stage"), optimizer=torch.optim.AdamW)
    none = memgraph.pipeline(made("gpt2", 8)[0], "1GB", 2, group=mesh.get_group("stage"))
    pipe = memgraph.pipeline(model, "1GB", 2, group=mesh.get_group("stage"), optimizer=make)
    balance = None
    for each in (pipe, none, whole):
        each.given = replace(each.given, balance=balance)
        each.prepare(**own)
        balance = each._cut.cut.begins
    assert isinstance(pipe.optimizer, memgraph.OSS)
    for _ in range(STEPS):
        pipe.step(**own)
        pipe.optimizer.step()
        pipe.optimizer.zero_grad()
        _step(plain, batch, reference)
    known = dict(plain.named_parameters())
    wrong = [name for name, parameter in pipe.named_parameters() if not torch.equal(parameter, known[name])]
    states = sum(state.nbytes for each in pipe.optimizer.inner.state.values() for state in each.values())
    counted = pipe._cut.parameters[pipe.group.rank].states
    with pytest.raises(memgraph.StateError, match="sharded optimizer"):
        pipe.save_sharded("nowhere")
    return [wrong, states, counted, pipe._cut.cut.begins, none.peak, pipe.peak, whole.peak, pipe.report.measured]


@pytest.mark.long
def test_states_of_a_sharded_optimizer_count_and_replicas_have_the_same_stages() -> None:
    found = on_ranks(4, _counted)
    assert len({each[3] for each in found}) == 1
    for wrong, states, counted, _, none, share, whole, measured in found:
        assert wrong == []
        assert 0 < states <= counted < 1.2 * states
        assert none < share < whole
        assert measured <= share


def _step(plain: nn.Module, batch: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
    """Update by the mean of the gradients of both halves."""
    halves = [in_turn(plain, {key: value.chunk(2)[i] for key, value in batch.items()}, 2)[0] for i in range(2)]
    for parameter, first, second in zip(plain.parameters(), *(each.parameters() for each in halves), strict=True):
        assert first.grad is not None and second.grad is not None
        parameter.grad = (first.grad + second.grad) / 2
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.long
@pytest.mark.parametrize("sharded", [False, True])
def test_replicas_of_a_pipeline_train_as_eager_on_the_whole_batch(sharded: bool) -> None:
    assert on_ranks(4, _trained, sharded) == [[]] * 4
