"""What trains a module over several processes stands around the compiled module, and not inside of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import memgraph
from tests.alike import ROOM


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("whole", [True, False])
def test_a_module_whose_gradients_ddp_averages_is_refused_with_what_helps_and_that_does(whole: bool) -> None:
    net = nn.Linear(4, 4)
    wrapped = DistributedDataParallel(net)
    what = "model" if whole else r"model\.0"
    with pytest.raises(TypeError, match=rf"^{what} is a DistributedDataParallel.*\(memgraph\.compile\(net, budget\)\)"):
        memgraph.compile(wrapped if whole else nn.Sequential(wrapped), ROOM)
    model = DistributedDataParallel(memgraph.compile(net, ROOM))
    model(torch.ones(2, 4)).sum().backward()
    assert torch.equal(net.weight.grad, torch.full((4, 4), 2.0))  # type: ignore[arg-type]


def test_a_module_whose_parameters_are_sharded_is_refused_with_what_helps() -> None:
    sharded = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(TypeError, match=r"^model is a FSDPLinear, .*memgraph\.OSS"):
        memgraph.compile(sharded, ROOM)
