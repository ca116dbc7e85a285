"""OSS is an optimizer as others are: groups, schedulers, closures, hooks."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook

import memgraph
from tests.memgraph.oss.test_gradients import give, same, tensors
from tests.memgraph.oss.test_steps import groups, net
from tests.support.ranks import on_ranks


def _scheduled(rank: int) -> None:
    schedules: list[Callable[[optim.Optimizer], Any]] = [
        lambda o: lr_scheduler.StepLR(o, 2),
        lambda o: lr_scheduler.CosineAnnealingLR(o, 6),
        lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
        lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=9),
        lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2, cycle_momentum=True),
    ]
    for kind in (optim.Adam, optim.SGD):
        options: dict[str, Any] = {"momentum": 0.9, "lr": 0.1} if kind is optim.SGD else {}
        for make in schedules:
            ours, plain = tensors((5, 7), (3,)), tensors((5, 7), (3,))
            sharded, alone = memgraph.OSS(ours, kind, **options), kind(plain, **options)
            assert sharded.defaults == alone.defaults
            schedule, beside = make(sharded), make(alone)
            for step in range(6):
                give(ours, step, 2)
                give(plain, step, 2)
                sharded.step()
                alone.step()
                schedule.step()
                beside.step()
                assert same(ours, plain)


def test_schedulers_act_as_on_the_plain_optimizer() -> None:
    on_ranks(2, _scheduled)


def _grouped(rank: int) -> None:
    for kind in (optim.SGD, optim.Adagrad, optim.Adafactor, optim.Adam):
        ours, plain = tensors((5, 7), (3,), (20,)), tensors((5, 7), (3,), (20,))
        given = [{"params": ours[:1], "lr": 0.2}]
        sharded, alone = memgraph.OSS(given, kind), kind([{"params": plain[:1], "lr": 0.2}])
        assert given == [{"params": ours[:1], "lr": 0.2}]
        for step in range(4):
            if step == 1:
                later = {"params": (p for p in ours[1:]), "weight_decay": 0.1}
                sharded.add_param_group(later)
                assert set(later) == {"params", "weight_decay"}
                if kind is not optim.Adagrad:  # which forgets the states of groups that come later
                    alone.add_param_group({"params": plain[1:], "weight_decay": 0.1})
                    assert [set(group) for group in sharded.param_groups] == [
                        set(group) for group in alone.param_groups
                    ]
            if step == 2:
                sharded.param_groups[0]["lr"] = alone.param_groups[0]["lr"] = 0.3
            used = 1 if kind is optim.Adagrad or step == 0 else 3
            give(ours[:used], step, 2)
            give(plain[:used], step, 2)
            sharded.step()
            alone.step()
            assert same(ours[:used], plain[:used]), (kind, step)
        with pytest.raises(ValueError, match="more than one"):
            sharded.add_param_group({"params": ours[:1]})
        with pytest.raises(memgraph.ShardError, match="twice"):
            sharded.add_param_group({"params": [nn.Parameter(torch.ones(1))] * 2})
        assert len(sharded.param_groups) == 2
    named = memgraph.OSS(nn.Linear(3, 2).named_parameters(), optim.SGD)
    assert named.param_groups[0]["param_names"] == ["weight", "bias"]


def test_a_group_that_is_added_is_complete_at_once() -> None:
    on_ranks(2, _grouped)


class Counted(optim.Optimizer):
    """Writes into its groups, takes arguments, and may look at a closure."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None, scale: float = 1.0) -> Any:
        for group in self.param_groups:
            group["steps"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"] * scale)
        return closure() if closure else None


class Twice(Counted):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        closure()
        return closure()


def _called(rank: int) -> None:
    ours = tensors((5, 7), (3,))
    sharded = memgraph.OSS(ours, Counted, lr=1.0)
    seen: list[str] = []
    sharded.register_step_pre_hook(lambda *_: seen.append("pre"))
    sharded.register_step_post_hook(lambda *_: seen.append("post"))
    everywhere = register_optimizer_step_post_hook(lambda one, *_: seen.append(type(one).__name__))
    before = [p.detach().clone() for p in ours]

    def closure() -> Tensor:
        sharded.zero_grad()
        seen.append("closure")
        loss = torch.stack([p.sum() for p in ours]).sum()
        loss.backward()
        return loss

    assert isinstance(sharded.step(closure, scale=2.0), Tensor)
    everywhere.remove()
    assert seen == ["pre", "closure", "post", "OSS"]
    assert sharded.param_groups[0]["steps"] == 1
    assert all(torch.equal(p, was - 2) for p, was in zip(ours, before, strict=True))
    sharded.zero_grad()
    assert all(p.grad is None for p in ours)
    sharded.step()
    give(ours, 0, 2)
    twice = memgraph.OSS(ours, Twice)
    with pytest.raises(memgraph.ShardError, match="twice"):
        twice.step(lambda: 1.0)
    with pytest.raises(memgraph.ShardError, match="ranks may differ"):
        twice.step(lambda: 1.0)
    adam = memgraph.OSS(ours, optim.Adam)
    assert adam.step(lambda: 7.0) == 7.0
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(memgraph.ShardError, match="state_dict"):
            copied(adam)

    def failing() -> float:
        if rank:
            raise KeyError("no batch")
        return 1.0

    with pytest.raises(KeyError if rank else memgraph.ShardError):
        adam.step(failing)
    adam.step(lambda: 1.0)


def test_closures_arguments_and_hooks_are_the_plain_optimizers() -> None:
    on_ranks(2, _called)


def _searched(rank: int, gradients: str) -> None:
    x = torch.randn(8, 11, generator=torch.Generator().manual_seed(3))
    counts = [0, 0]
    for search in (None, "strong_wolfe"):
        ours, plain = net(), net()
        given: dict[str, Any] = {"lr": 0.5, "max_iter": 5, "line_search_fn": search}
        sharded = memgraph.OSS(ours.parameters(), optim.LBFGS, gradients=gradients, **given)
        alone = optim.LBFGS(plain.parameters(), **given)
        for _ in range(3):
            losses = [sharded.step(_closure(ours, x, counts, 0)), alone.step(_closure(plain, x, counts, 1))]
            assert torch.equal(*losses)
            assert same(list(ours.parameters()), list(plain.parameters()))
        assert counts[0] == counts[1] > 6
    assert bool(sharded.inner.state) == (rank == 0)

    def failing() -> float:
        counts[0] += 1
        if rank and counts[0] % 2:
            raise KeyError("no batch")
        return 1.0

    counts[0] = 0
    with pytest.raises(KeyError if rank else memgraph.ShardError):
        sharded.step(failing)
    with pytest.raises(TypeError, match="closure"):
        sharded.step()


def _closure(module: nn.Module, x: Tensor, counts: list[int], which: int) -> Callable[[], Any]:
    def closure() -> Tensor:
        counts[which] += 1
        module.zero_grad()
        loss = module(x).square().mean()
        loss.backward()
        return loss

    return closure


@pytest.mark.parametrize("gradients", ["average", "same"])
def test_lbfgs_evaluates_as_often_as_alone_and_finds_the_same(gradients: str) -> None:
    on_ranks(2, _searched, gradients)


def _beside_ddp(rank: int) -> None:
    x = torch.randn(6, 11, generator=torch.Generator().manual_seed(3))
    plain, same_module, own = net(), net(), net()
    wrapped = [DistributedDataParallel(module) for module in (plain, same_module)]
    alone = optim.AdamW(groups(plain))
    same_gradients = memgraph.OSS(groups(same_module), gradients="same")
    averaging = memgraph.OSS(groups(own))
    for _ in range(4):
        for module, optimizer in zip([*wrapped, own], [alone, same_gradients, averaging], strict=True):
            module(x[rank * 3 : rank * 3 + 3]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert same(list(plain.parameters()), list(same_module.parameters()))
        assert same(list(plain.parameters()), list(own.parameters()))


def test_with_and_without_ddp_steps_are_those_of_ddp_and_the_plain_optimizer() -> None:
    on_ranks(2, _beside_ddp)


def _alone(rank: int) -> None:
    for name in ("all_reduce", "isend", "irecv", "all_gather", "broadcast", "reduce"):
        setattr(dist, name, None)  # to call it is an error
    for kind in (optim.Adam, optim.Adafactor):
        ours, plain = tensors((5, 7), (3,)), tensors((5, 7), (3,))
        sharded, alone = memgraph.OSS(ours, kind, wire_dtype=torch.bfloat16), kind(plain)
        for step in range(3):
            give(ours, step, 1)
            give(plain, step, 1)
            torch.testing.assert_close(sharded.clip_grad_norm_(1.0), nn.utils.clip_grad_norm_(plain, 1.0))
            sharded.step()
            alone.step()
            torch.testing.assert_close(ours, plain)


def test_one_rank_sends_nothing() -> None:
    on_ranks(1, _alone)


def _disagree(rank: int) -> None:
    ours = tensors((5, 7), (3,))
    sharded = memgraph.OSS(ours)
    if rank:
        ours[0].data = ours[0].data.double()
    with pytest.raises(memgraph.ShardError, match="different shapes, types"):
        sharded.step()


def test_ranks_with_different_parameters_raise_an_error() -> None:
    on_ranks(2, _disagree)
