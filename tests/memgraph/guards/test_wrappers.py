"""Wrappers that train a module, such as DDP, must wrap the compiled module, and not be inside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import memgraph
from tests.support.compare import ROOM


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
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


@pytest.mark.usefixtures("one_rank")
def test_a_module_whose_parameters_are_sharded_is_refused_with_what_helps() -> None:
    sharded: Any = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(TypeError, match=r"^model is a FSDPLinear, .*memgraph\.OSS"):
        memgraph.compile(sharded, ROOM)


class Stepping(nn.Module):
    """As Lightning has it: a loop calls `training_step`, and that the network."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 4)

    def training_step(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.net(batch).square().mean()
        return loss


def test_a_training_step_that_would_run_outside_of_the_budget_is_warned_of_and_the_network_in_it_is_planned() -> None:
    module: Any = Stepping()
    with pytest.warns(RuntimeWarning, match=r"Stepping\.training_step runs the plain one.*self\.net = ") as said:
        memgraph.compile(module, ROOM)
    assert [warning.filename for warning in said] == [__file__]
    module.net = memgraph.compile(module.net, ROOM)
    module.training_step(torch.ones(2, 4)).backward()
    assert module.net.plan.peak <= module.net.plan.budget
