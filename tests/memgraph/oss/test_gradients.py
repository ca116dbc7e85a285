"""Gradients of several ranks: averaged, missing on some, sparse, in any layout; clipped and scaled."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.nn.utils import clip_grad_norm_

import memgraph
from memgraph.oss import optimizer
from memgraph.oss.comm import exchange
from memgraph.profile.memory_meter import measure_peak
from tests.support.ranks import on_ranks


def tensors(*shapes: tuple[int, ...], seed: int = 0) -> list[nn.Parameter]:
    numbers = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=numbers)) for shape in shapes]


def give(parameters: list[nn.Parameter], step: int, ranks: int, rank: int | None = None) -> None:
    """Gradients of a step: of one rank, or the mean of all as they are averaged."""
    for i, parameter in enumerate(parameters):
        numbers = [torch.Generator().manual_seed(1000 * step + 10 * i + r) for r in range(ranks)]
        every = [torch.randn(parameter.shape, generator=one).to(parameter.dtype) for one in numbers]
        parameter.grad = every[rank] if rank is not None else sum(every[1:], every[0]).div_(ranks)


def gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def same(ours: list[nn.Parameter], plain: list[nn.Parameter]) -> bool:
    return all(map(torch.equal, ours, plain))


BUCKET = 1 << 16  # bytes, a fiftieth of the gradients
SHAPES = ((5, 7), (3,), (0,), (), (2, 3, 4, 5), (41,))


def use_transport(way: str) -> None:
    """Select how this process exchanges buckets from now on."""
    if way != "shared_memory":
        pytest.MonkeyPatch().setattr(optimizer, "shared_memory_comm", lambda exchange: None)
    if way == "collectives":
        pytest.MonkeyPatch().setattr(exchange, "_on_cpu", lambda sources: False)


def _averaged(rank: int, ranks: int, way: str) -> None:
    use_transport(way)
    ours, plain = tensors(*SHAPES), tensors(*SHAPES)
    sharded, alone = memgraph.OSS(ours, optim.Adam, lr=0.1, bucket_bytes=128), optim.Adam(plain, lr=0.1)
    assert sharded.comm.shared_memory is None or way == "shared_memory"
    for step in range(4):
        give(ours, step, ranks, rank)
        give(plain, step, ranks)
        before = [parameter.grad.clone() for parameter in ours if parameter.grad is not None]
        sharded.step()
        alone.step()
        if way == "collectives":  # which add in an order of their own
            torch.testing.assert_close(ours, plain)
        else:
            assert same(ours, plain)
        assert all(torch.equal(p.grad, was) for p, was in zip(ours, before, strict=True) if p.grad is not None)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("way", ["shared_memory", "p2p", "collectives"])
def test_a_step_averages_over_ranks_and_leaves_gradients_as_they_are(ranks: int, way: str) -> None:
    on_ranks(ranks, _averaged, ranks, way)


def _some_missing(rank: int, way: str) -> None:
    use_transport(way)
    ours, plain = tensors(*SHAPES), tensors(*SHAPES)
    sharded, alone = memgraph.OSS(ours, optim.AdamW, lr=0.1), optim.AdamW(plain, lr=0.1)
    for step in range(3):
        give(ours, step, 2, rank)
        give(plain, step, 2)
        ours[1].grad = plain[1].grad = None  # no rank has it: AdamW would let it decay
        if rank:
            ours[0].grad = None
        plain[0].grad = torch.randn(5, 7, generator=torch.Generator().manual_seed(1000 * step)) / 2
        sharded.step()
        alone.step()
        assert same(ours, plain)
    assert not any(view.shape == (3,) for view in sharded.inner.state)


@pytest.mark.parametrize("way", ["shared_memory", "p2p"])
def test_a_gradient_that_one_rank_has_counts_and_one_that_none_has_does_not(way: str) -> None:
    on_ranks(2, _some_missing, way)


def _clipped(rank: int, way: str) -> None:
    use_transport(way)
    for order in (2.0, 1.0, 3.0, 0.5, -1.0, 0.0, math.inf, "inf"):
        for most in (0.3, 1e6):
            ours, plain = tensors(*SHAPES), tensors(*SHAPES)
            sharded, alone = memgraph.OSS(ours, optim.SGD, lr=0.1), optim.SGD(plain, lr=0.1)
            give(ours, 0, 2, rank)
            give(plain, 0, 2)
            wanted = clip_grad_norm_([p for p in plain if p.numel()], most, float(order))
            found = sharded.clip_grad_norm_(most, order)
            torch.testing.assert_close(found, wanted)
            again, wanted_again = (
                sharded.clip_grad_norm_(most / 2, order),
                clip_grad_norm_([p for p in plain if p.numel()], most / 2, float(order)),
            )
            torch.testing.assert_close(again, wanted_again)
            sharded.step()
            alone.step()
            torch.testing.assert_close(list(ours), list(plain))


@pytest.mark.parametrize("way", ["shared_memory", "p2p"])
def test_a_norm_is_that_of_the_averaged_gradient_and_may_be_clipped_twice(way: str) -> None:
    on_ranks(2, _clipped, way)


def _clipped_to_the_bit(rank: int, kind: Any, gradients: str) -> None:
    for order in (2.0, 1.0, 3.0, math.inf):
        ours, plain = tensors(*LARGE), tensors(*LARGE)
        sharded, alone = memgraph.OSS(ours, kind, lr=0.1, gradients=gradients), kind(plain, lr=0.1)
        give(ours, 0, 2)
        give(plain, 0, 2)
        assert torch.equal(sharded.clip_grad_norm_(0.3, order), clip_grad_norm_(plain, 0.3, order))
        sharded.step()
        alone.step()
        assert same(ours, plain)


LARGE = (517, 31), (1009,), (64, 3, 5), (2, 333)
WHOLE = [(1, optim.SGD, "average"), (2, optim.SGD, "same"), (2, optim.Adafactor, "average")]


@pytest.mark.parametrize("ranks, kind, gradients", WHOLE, ids=["alone", "the same on all", "whole parameters"])
def test_clipping_is_torchs_to_the_bit_where_each_gradient_is_whole_somewhere(
    ranks: int, kind: Any, gradients: str
) -> None:
    on_ranks(ranks, _clipped_to_the_bit, kind, gradients)


def _tensor_parallel(rank: int) -> None:
    """A grid of 2 x 2: ranks of a column have the same parts of parameters, ranks of a row the other parts."""
    groups: list[Any] = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3], [0, 1], [2, 3])]
    data, model, part = groups[rank % 2], groups[2 + rank // 2], rank % 2
    for order in (2.0, 1.0, 0.0, 3.0, math.inf, -1.0):
        whole = tensors((6, 8), (5,), (4, 2))
        give(whole, 0, 2)
        grads = [gradient(each) for each in whole]
        ours = tensors((6, 4), (5,), (4, 1))
        for tensor, grad in zip(
            ours, (grads[0][:, 4 * part :][:, :4], grads[1], grads[2][:, part:][:, :1]), strict=True
        ):
            tensor.grad = grad.contiguous().clone()
        sharded = memgraph.OSS(ours, optim.SGD, lr=0.1, group=data)
        found = sharded.clip_grad_norm_(0.2, order, group=model, replicated=[ours[1]])
        torch.testing.assert_close(found, clip_grad_norm_(whole, 0.2, order))
        before = [each.detach().clone() for each in ours]
        sharded.step()
        moved = [(was - now) / 0.1 for was, now in zip(before, ours, strict=True)]
        torch.testing.assert_close(moved[0], grads[0][:, 4 * part :][:, :4], atol=1e-5, rtol=1e-4)
    sharded.zero_grad()
    give(ours, 0, 2)
    with pytest.raises(ValueError, match="no parameter of this optimizer"):
        sharded.clip_grad_norm_(1.0, group=model, replicated=whole)
    with pytest.raises(ValueError, match="no process group that this rank is in"):
        sharded.clip_grad_norm_(1.0, group=groups[2 + 1 - rank // 2])
    if rank % 2:
        for each in ours:
            each.grad = None if each is ours[2] else each.grad
    with pytest.raises(memgraph.AgreementError, match="parts of the same ones"):
        sharded.clip_grad_norm_(1.0, group=model)


def test_the_norm_of_shards_of_a_tensor_parallel_model_is_that_of_the_whole_one() -> None:
    on_ranks(4, _tensor_parallel)


def _clipped_anew(rank: int) -> None:
    ours = tensors((4,), (3,))
    sharded = memgraph.OSS(ours, optim.SGD, lr=1.0)
    assert sharded.clip_grad_norm_(1.0) == 0  # before the first backward
    sharded.step()
    give(ours, 0, 2, rank)
    ours[1].grad = None
    first = sharded.clip_grad_norm_(1.0)
    sharded.step()
    sharded.zero_grad()
    give(ours, 0, 2, rank)
    assert sharded.clip_grad_norm_(1.0) > first > 0
    if rank == 0:
        gradient(ours[0]).add_(1)
    with pytest.raises(memgraph.ShardError, match="after they had been averaged" if rank == 0 else "another rank"):
        sharded.step()
    sharded.zero_grad()
    give(ours, 0, 2, rank)
    gradient(ours[0])[rank] = math.nan
    assert sharded.clip_grad_norm_(1.0).isnan()
    with pytest.raises(RuntimeError, match="nan"):
        sharded.clip_grad_norm_(1.0, error_if_nonfinite=True)


def test_a_norm_is_of_the_gradients_that_there_are_now() -> None:
    on_ranks(2, _clipped_anew)


def _clipped_in_place(rank: int) -> None:
    ours, plain = tensors(*SHAPES), tensors(*SHAPES)
    sharded = memgraph.OSS(ours, optim.SGD, lr=0.1, gradients="same")
    give(ours, 0, 2)
    give(plain, 0, 2)
    torch.testing.assert_close(sharded.clip_grad_norm_(0.5), clip_grad_norm_(plain, 0.5))
    torch.testing.assert_close([p.grad for p in ours], [p.grad for p in plain])


def test_gradients_that_are_the_same_are_clipped_where_they_are() -> None:
    on_ranks(2, _clipped_in_place)


def _clipped_by_half_of_the_ranks(rank: int) -> list[float]:
    groups: list[Any] = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    ours = tensors((5, 7), seed=rank % 2)
    sharded = memgraph.OSS(ours, optim.SGD, lr=0.1, group=groups[rank % 2])
    with pytest.raises(memgraph.ShardError, match="not in the group"):
        memgraph.OSS(ours, group=groups[1 - rank % 2])
    ours[0].grad = torch.full((5, 7), 1.0 + rank)
    norm = float(sharded.clip_grad_norm_(1.0))
    sharded.step()
    return [norm, float(ours[0].sum())]


def test_a_subgroup_steps_by_itself() -> None:
    found = on_ranks(4, _clipped_by_half_of_the_ranks)
    assert found[0] == found[2] != found[1] == found[3]
    assert found[0][0] == pytest.approx(2 * math.sqrt(35))
    assert found[1][0] == pytest.approx(3 * math.sqrt(35))


def _scaled(rank: int, kind: type[Any], unscale: bool, gradients: str) -> list[float]:
    ours, plain = tensors((5, 7), (3,)), tensors((5, 7), (3,))
    sharded, alone = memgraph.OSS(ours, optim.Adam, lr=0.1, gradients=gradients), optim.Adam(plain, lr=0.1)
    scaler, beside = (one("cpu", init_scale=4.0, growth_interval=2) for one in (kind, torch.amp.GradScaler))
    for step in range(5):
        infinite = step == 1
        for parameters, one, stepping, mine in ((ours, scaler, sharded, rank), (plain, beside, alone, None)):
            give(parameters, step, 2, None if gradients == "same" else mine)
            for parameter in parameters:
                assert parameter.grad is not None
                one.scale(torch.ones(()))  # makes the scale
                parameter.grad *= one.get_scale()
            if infinite and (mine is None or rank == 1 or gradients == "same"):
                gradient(parameters[0])[0, 0] = math.inf
            if unscale:
                one.unscale_(stepping)
                if not infinite:
                    sharded.clip_grad_norm_(1e6) if stepping is sharded else clip_grad_norm_(parameters, 1e6)
            one.step(stepping)
            one.update()
            stepping.zero_grad()
        assert same(ours, plain), step
    assert (kind is torch.amp.GradScaler and gradients == "average") or scaler.get_scale() == beside.get_scale()
    return [scaler.get_scale()]


def _scalers(rank: int) -> None:
    for unscale in (False, True):
        _scaled(rank, torch.amp.GradScaler, unscale, "same")
        _scaled(rank, memgraph.GradScaler, unscale, "average")
        _scaled(rank, torch.amp.GradScaler, unscale, "average")


def test_a_step_that_is_infinite_on_one_rank_is_left_out_on_all() -> None:
    on_ranks(2, _scalers)


def _sparse(rank: int) -> None:
    for kind, options in ((optim.SparseAdam, {}), (optim.SGD, {}), (optim.Adagrad, {})):
        ours, plain = (nn.Embedding(11, 3, sparse=True) for _ in range(2))
        dist.broadcast(ours.weight.detach(), 0)
        plain.load_state_dict(ours.state_dict())
        sharded, alone = (
            memgraph.OSS(ours.parameters(), kind, lr=0.1, **options),
            kind(plain.parameters(), lr=0.1, **options),
        )
        for step in range(3):
            rows = torch.tensor([[step, 4, 4], [step, 7, 8]])
            (ours(rows[rank]) * 2).sum().backward()
            plain(rows).sum().backward()
            sharded.step()
            alone.step()  # type: ignore[no-untyped-call, unused-ignore]
            sharded.zero_grad()
            alone.zero_grad()
            # SGD and Adagrad add the rows of a sparse gradient by kernels of their own, which round otherwise.
            tolerance = 0 if kind is optim.SparseAdam else 1e-6
            torch.testing.assert_close(ours.weight, plain.weight, rtol=tolerance, atol=tolerance)
    dense = memgraph.OSS([ours.weight], optim.Adam)
    ours(torch.tensor([1])).sum().backward()
    with pytest.raises(memgraph.ShardError, match="SparseAdam"):
        dense.step()


def test_sparse_gradients_update_the_rows_that_any_rank_has_touched() -> None:
    on_ranks(2, _sparse)


def _allocates(rank: int, way: str) -> None:
    use_transport(way)
    ours = tensors((1000, 500), (300, 1000), *[(1000,)] * 200)
    sharded = memgraph.OSS(ours, optim.SGD, bucket_bytes=BUCKET)
    give(ours, 0, 2, rank)
    _, seen = measure_peak(sharded.step)
    assert seen is not None
    way = way if sharded.comm.shared_memory or way != "shared_memory" else "p2p"  # where the kernel forbids reading
    assert 0 < seen.peak < {"shared_memory": 2, "p2p": 8}[way] * BUCKET


# Collectives end on gloo's own threads, and what is freed there, the meter does not see.
@pytest.mark.parametrize("way", ["shared_memory", "p2p"])
def test_a_step_takes_the_memory_of_a_few_buckets(way: str) -> None:
    on_ranks(2, _allocates, way)


def _drawn(rank: int, ranks: int, way: str) -> None:
    use_transport(way)
    numbers = random.Random(5)
    types = [torch.float32, torch.float64, torch.bfloat16]
    for turn in range(12):
        shapes = [tuple(numbers.choices([1, 2, 3, 7, 20], k=numbers.randint(0, 3))) for _ in range(8)]
        kinds = numbers.choices(types, k=8)
        ours, plain = (
            [nn.Parameter(p.detach().to(k)) for p, k in zip(tensors(*shapes, seed=turn), kinds, strict=True)]
            for _ in range(2)
        )
        kind = numbers.choice([optim.Adam, optim.SGD, optim.Adafactor, optim.RAdam])
        given: dict[str, Any] = {"lr": 0.1, "bucket_bytes": numbers.choice([64, 4096, 1 << 20])}
        sharded, alone = memgraph.OSS(ours, kind, **given), kind(plain, lr=0.1)
        for step in range(3):
            missing = numbers.sample(range(8), 2)
            give(ours, step, ranks, rank)
            give(plain, step, ranks)
            for i in missing:
                ours[i].grad = plain[i].grad = None
            sharded.step()
            alone.step()
        assert same(ours, plain), (turn, kind, shapes, kinds)


@pytest.mark.long
@pytest.mark.parametrize("way", ["shared_memory", "p2p"])
def test_whatever_the_shapes_the_bits_are_those_of_the_plain_optimizer(way: str) -> None:
    on_ranks(3, _drawn, 3, way)
