"""Wrappers that train a module, such as DDP, must wrap the compiled module, and not be inside it; what they hold counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import memgraph
from memgraph.profile.memory_meter import measure_peak
from tests.support.compare import ROOM
from tests.support.ranks import on_ranks
from tests.support.smallest_budget import smallest_of

Wrap = Callable[[nn.Module, Callable[[nn.Module], nn.Module]], Any]  # the module, and what compiles it or a part


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


@pytest.mark.usefixtures("one_rank")
def test_a_module_of_replicate_is_refused_like_ddp() -> None:
    with pytest.raises(TypeError, match=r"^model is a DDPLinear, which averages gradients"):
        memgraph.compile(replicate(nn.Linear(4, 4)), ROOM)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("wrap", [DistributedDataParallel, replicate, FullyShardedDataParallel])
def test_a_wrapper_that_comes_inside_later_is_refused_before_the_step(wrap: Any) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = memgraph.compile(net, ROOM)
    model(torch.ones(2, 4)).sum().backward()
    net[1] = wrap(net[1], **({"device_id": torch.device("cpu")} if wrap is FullyShardedDataParallel else {}))
    with pytest.raises(memgraph.CaptureError, match=r"^1 is a .*, which (averages|gathers)"):
        model(torch.ones(2, 4))


@pytest.mark.usefixtures("one_rank")
def test_a_sharded_parameter_in_the_place_of_a_frozen_one_is_refused_before_the_step() -> None:
    net = nn.Linear(4, 4)
    net.weight.requires_grad_(False)
    model = memgraph.compile(net, ROOM)
    model(torch.ones(2, 4)).sum().backward()
    sharded = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (1,)), [Replicate()])
    net.weight = nn.Parameter(sharded, requires_grad=False)
    with pytest.raises(memgraph.CaptureError, match=r"parameter weight is a .* DTensor.*fully_shard"):
        model(torch.ones(2, 4))


def test_modules_whose_values_hooks_load_are_refused_by_name() -> None:
    accelerate = pytest.importorskip("accelerate")
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    accelerate.cpu_offload(net, execution_device=torch.device("cpu"))
    with pytest.raises(
        ValueError, match=r"^the model is on meta, .*accelerate's cpu_offload.*remove_hook_from_submodules"
    ):
        memgraph.compile(net, ROOM)


class Chain(nn.Module):
    """Two blocks of three layers whose gradients are large beside the rest."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        parts = (nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(2))
        self.blocks = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def by_block(wrap: Callable[[nn.Module], Any]) -> Wrap:
    def wrapped(net: Any, compiled: Callable[[nn.Module], nn.Module]) -> Any:
        for i, block in enumerate(net.blocks):
            net.blocks[i] = wrap(compiled(block))
        return wrap(net)

    return wrapped


AROUND: dict[str, Wrap] = {
    "DistributedDataParallel": lambda net, compiled: DistributedDataParallel(
        compiled(net), gradient_as_bucket_view=True
    ),
    "replicate": lambda net, compiled: replicate(compiled(net)),
    "fully_shard": by_block(lambda part: fully_shard(part, mesh=init_device_mesh("cpu", (2,)))),
}


def local(tensor: Any) -> Tensor:
    held: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return held.detach().clone()


def trained(rank: int, wrap: Wrap, budget: int | None) -> tuple[list[Tensor], Any]:
    def compiled(part: nn.Module) -> nn.Module:
        return part if budget is None else memgraph.compile(part, budget, time_limit=0.0, accumulate=False)

    model: Any = wrap(Chain(), compiled)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    generator, found = torch.Generator().manual_seed(rank), list[Tensor]()
    for _ in range(3):
        loss = model(torch.randn(64, 128, generator=generator))
        loss.backward()
        found += [loss.detach(), *(local(p.grad) for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *map(local, model.parameters())], model


def _around(rank: int) -> list[str]:
    wrong = []
    for name, wrap in AROUND.items():
        budget = smallest_of(lambda: trained(rank, wrap, 1000))  # noqa: B023
        theirs, _ = trained(rank, wrap, None)
        ours, model = trained(rank, wrap, budget)
        wrong += [name] * (len(ours) != len(theirs) or not all(map(torch.equal, ours, theirs)))
        parts = [part for part in model.modules() if isinstance(part, memgraph.CompiledModule)]
        wrong += [f"{name} {p.plan}" for p in parts if not (p.plan.measured or 0) <= budget]
        # Of sharded blocks nothing is left to decide: others hold the memory of all parameters.
        wrong += [f"{name} has no plan"] * (name != "fully_shard" and not any(part.plan.plan for part in parts))
    return wrong


@pytest.mark.long
def test_wrappers_around_a_compiled_module_train_as_around_the_plain_one_in_its_smallest_budget() -> None:
    assert on_ranks(2, _around) == [[], []]


def _peaks(rank: int) -> tuple[int, int, int]:
    """The peak alone, the peak in a wrapper, and what the wrapper has allocated."""
    x = torch.ones(64, 128)
    alone = memgraph.compile(Chain(), ROOM)
    alone(x).backward()
    inside = memgraph.compile(Chain(), ROOM)
    model, seen = measure_peak(lambda: DistributedDataParallel(inside, init_sync=False))
    for _ in range(2):
        model(x).backward()
        model.zero_grad()
    with torch.no_grad():  # a call without the wrapper, whose buckets are still there
        inside(x)
    assert seen is not None
    return alone.plan.peak, inside.plan.peak, seen.net


@pytest.mark.long
def test_the_buckets_of_a_wrapper_count() -> None:
    for alone, inside, buckets in on_ranks(2, _peaks):
        assert buckets <= inside - alone < buckets + 1024


def refused(call: Callable[[], object]) -> str:
    try:
        call()
    except memgraph.MemgraphError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def _with_optimizers(rank: int) -> list[str]:
    x, texts = torch.ones(4, 128), []
    for sharded in (False, True):
        net = Chain()
        made: Any = memgraph.OSS(net.parameters()) if sharded else torch.optim.SGD(net.parameters())
        model: Any = fully_shard(memgraph.compile(net, ROOM, optimizer=made), mesh=init_device_mesh("cpu", (2,)))
        texts.append(refused(lambda: model(x)))  # noqa: B023
    net = Chain()
    twice = DistributedDataParallel(memgraph.compile(net, ROOM, optimizer=memgraph.OSS(net.parameters())))
    texts.append(refused(lambda: twice(x)))
    return texts


def test_an_optimizer_that_a_wrapper_makes_useless_is_refused_before_the_step() -> None:
    first, second = on_ranks(2, _with_optimizers)
    assert first == second
    of_other_parameters = "UpdateError: the module has other parameters than those of the optimizer"
    assert [text.startswith(of_other_parameters) for text in first] == [True, True, False]
    assert first[2].startswith("ShardError: a wrapper such as DistributedDataParallel averages the gradients")


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
