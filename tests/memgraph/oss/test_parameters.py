"""Parameters of every kind: frozen, moved, in other orders of memory, of several types; what can't be spread is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

import memgraph
from tests.memgraph.oss.test_gradients import give, gradient, same, tensors, use_transport
from tests.support.ranks import on_ranks


def pairs(*shapes: tuple[int, ...]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    return tensors(*shapes), tensors(*shapes)


def steps(
    ours: list[nn.Parameter], plain: list[nn.Parameter], sharded: optim.Optimizer, alone: optim.Optimizer
) -> None:
    """Three steps of both, with the same gradients on all ranks."""
    for step in range(3):
        give(ours, step, 2)
        give(plain, step, 2)
        sharded.step()
        alone.step()
    assert same(ours, plain)


def _frozen(rank: int) -> None:
    ours, plain = pairs((1000,), (10,), (6,))
    for parameters in (ours, plain):
        parameters[0].requires_grad_(False)
    sharded, alone = memgraph.OSS(ours, optim.Adam), optim.Adam(plain)
    trained = [piece.count for bucket in sharded.layout.buckets for piece, _ in bucket.own if piece.param > 0]
    assert sum(trained) == 8  # a frozen parameter does not unbalance the others
    for step in range(6):
        for parameters, optimizer in ((ours, sharded), (plain, alone)):
            parameters[0].requires_grad_(step >= 2)
            parameters[1].requires_grad_(step % 2 == 0)
            optimizer.zero_grad()
            torch.stack([p.square().sum() for p in parameters if p.requires_grad]).sum().backward()
            optimizer.step()
        assert same(ours, plain), step


@pytest.mark.long
def test_parameters_may_be_frozen_and_unfrozen_at_any_time() -> None:
    on_ranks(2, _frozen)


def _frozen_before_more_come(rank: int) -> None:
    for kind in (optim.SGD, optim.Adafactor):
        ours, plain = pairs((10,), (6,), (5,), (4,))
        sharded, alone = memgraph.OSS(ours[:3], kind, lr=0.1), kind(plain[:3], lr=0.1)
        steps(ours[:3], plain[:3], sharded, alone)
        for parameters, optimizer in ((ours, sharded), (plain, alone)):
            parameters[0].requires_grad_(False)
            optimizer.add_param_group({"params": parameters[3:]})
        steps(ours, plain, sharded, alone)  # with the gradient that the frozen one has left


def test_what_has_an_owner_keeps_it_when_parameters_are_frozen_and_added() -> None:
    on_ranks(2, _frozen_before_more_come)


def _tied(rank: int) -> None:
    nets = []
    for sharded in (True, False):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        net[1].weight = net[0].weight
        optimizer = memgraph.OSS(net.parameters(), optim.Adam) if sharded else optim.Adam(net.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            net(torch.ones(1, 6)).sum().backward()
            optimizer.step()
        assert net[1].weight is net[0].weight
        nets.append(net)
    assert all(map(torch.equal, nets[0].parameters(), nets[1].parameters()))


def test_tied_parameters_are_one_and_stay_tied() -> None:
    on_ranks(2, _tied)


def _moved(rank: int) -> None:
    ours, plain = pairs((5, 7), (3,), (40,))
    sharded, alone = memgraph.OSS(ours, optim.Adam, lr=0.1), optim.Adam(plain, lr=0.1)
    steps(ours, plain, sharded, alone)
    for parameters in (ours, plain):
        parameters[0].data = parameters[0].data + 1
        parameters[1].data = parameters[1].data.clone()
    steps(ours, plain, sharded, alone)
    if rank:
        ours[2].data = ours[2].data.double()
        ours[2].grad = None
    with pytest.raises(memgraph.ShardError, match="float64" if rank else "another rank"):
        sharded.step()


def test_a_parameter_with_new_memory_keeps_its_state_and_one_of_another_type_is_refused() -> None:
    on_ranks(2, _moved)


def _converted(rank: int) -> None:
    ours, plain = nn.Linear(5, 3), nn.Linear(5, 3)
    dist.broadcast(ours.weight.detach(), 0)
    dist.broadcast(ours.bias.detach(), 0)
    plain.load_state_dict(ours.state_dict())
    sharded, alone = memgraph.OSS(ours.parameters(), optim.Adam), optim.Adam(plain.parameters())
    ours.double()
    plain.double()
    steps(list(ours.parameters()), list(plain.parameters()), sharded, alone)
    assert ours.weight.dtype == torch.float64


def test_a_module_may_be_converted_before_the_first_step() -> None:
    on_ranks(2, _converted)


def _laid(rank: int) -> None:
    for make in (
        lambda p: p.to(memory_format=torch.channels_last),
        lambda p: p.transpose(0, 1),
        lambda p: torch.cat([p, p])[::2],  # with gaps
    ):
        ours, plain = ([nn.Parameter(make(p.detach())), q] for p, q in pairs((6, 4, 3, 2), (5,)))
        strides = ours[0].stride()
        sharded, alone = memgraph.OSS(ours, optim.AdamW, lr=0.1), optim.AdamW(plain, lr=0.1)
        steps(ours, plain, sharded, alone)
        x = torch.randn(2, *ours[0].shape[1:], generator=torch.Generator().manual_seed(0))
        for parameters, optimizer in ((ours, sharded), (plain, alone)):
            optimizer.zero_grad()
            (parameters[0] * x[:1]).square().sum().backward()
            optimizer.step()
        assert same(ours, plain) and ours[0].stride() == strides


def test_a_parameter_keeps_its_order_of_memory() -> None:
    on_ranks(2, _laid)


def _mixed(rank: int) -> None:
    def made() -> list[nn.Parameter]:
        types = (torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.complex64)
        return [nn.Parameter(p.detach().to(kind)) for p, kind in zip(tensors(*[(300,)] * 5), types, strict=True)]

    ours, plain = made(), made()
    sharded, alone = memgraph.OSS(ours, optim.Adam), optim.Adam(plain)
    for step in range(3):
        for parameters in (ours, plain):
            for i, parameter in enumerate(parameters):
                numbers = torch.Generator().manual_seed(10 * step + i)
                parameter.grad = torch.randn(300, generator=numbers).to(parameter.dtype)
        sharded.step()
        alone.step()
    assert same(ours, plain)


def test_types_may_be_mixed() -> None:
    on_ranks(2, _mixed)


def _refused(rank: int) -> None:
    w = tensors((4, 3))[0]
    for wrong, words in (
        (lambda: memgraph.OSS([w, w]), "twice"),
        (lambda: memgraph.OSS([w, nn.Parameter(w.detach()[1:])]), "share memory"),
        (lambda: memgraph.OSS([nn.Parameter(torch.zeros(1).expand(3))]), "overlap"),
        (lambda: memgraph.OSS([w], gradients="sum"), "'average', 'same'"),
        (lambda: memgraph.OSS([w], wire_dtype=torch.int8), "bfloat16"),
    ):
        with pytest.raises(memgraph.ShardError, match=words):
            wrong()  # type: ignore[no-untyped-call]
    with pytest.raises(ValueError, match="more than one"):
        memgraph.OSS([{"params": [w]}, {"params": [w]}])
    with pytest.raises(ValueError, match="empty"):
        memgraph.OSS([])
    with pytest.raises(ValueError, match="learning rate"):
        memgraph.OSS([w], lr=-1.0)


def test_what_cannot_be_sharded_is_refused() -> None:
    on_ranks(1, _refused)


def test_without_a_process_group_the_error_says_what_to_call() -> None:
    with pytest.raises(memgraph.ShardError, match="init_process_group"):
        memgraph.OSS(tensors((3,)))


def _few_elements(rank: int) -> int:
    ours, plain = pairs((2,), (1,))
    sharded, alone = memgraph.OSS(ours, optim.Adam), optim.Adam(plain)
    steps(ours, plain, sharded, alone)
    return sum(value.numel() for state in sharded.inner.state.values() for value in [state["exp_avg"]])


def test_ranks_may_be_more_than_elements() -> None:
    assert on_ranks(4, _few_elements) == [1, 1, 1, 0]


def _share(rank: int) -> int:
    ours = tensors((3000, 100), (77,), (1,), (200, 33))
    sharded = memgraph.OSS(ours, optim.Adam, bucket_bytes=1 << 18)
    give(ours, 0, 2)
    sharded.step()
    return sum(
        value.nbytes for state in sharded.inner.state.values() for value in state.values() if isinstance(value, Tensor)
    )


def test_each_rank_holds_its_share_of_the_state() -> None:
    shares = on_ranks(3, _share)
    whole = 8 * (300_000 + 77 + 1 + 6600)
    assert all(share == pytest.approx(whole / 3, rel=0.01) for share in shares)


def _rounded(rank: int, kind: torch.dtype) -> list[list[float]]:
    ours = tensors((5, 7), (3,))
    ours.append(nn.Parameter(torch.full((3,), 1 + 2.0**-40, dtype=torch.float64)))
    sharded = memgraph.OSS(ours, optim.SGD, lr=0.1, wire_dtype=kind)
    give(ours, 0, 2, rank)
    gradient(ours[2]).zero_()
    sharded.step()
    assert all(torch.equal(p, p.to(kind).float()) for p in ours[:2])
    assert ours[2].tolist() == [1 + 2.0**-40] * 3  # float64 is never rounded
    if kind is torch.float16:
        give(ours, 1, 2, rank)
        before = [p.detach().clone() for p in ours]
        if rank:
            gradient(ours[0])[0, 0] = 1e5
        with pytest.raises(memgraph.ShardError, match="float16" if rank else "another rank"):
            sharded.step()
        assert all(map(torch.equal, ours, before))
        give(ours, 1, 2)
        gradient(ours[0])[0, 0] = -6e4
        sharded.param_groups[0]["lr"] = 2.0
        with pytest.raises(memgraph.ShardError, match="is complete"):
            sharded.step()
        assert float(ours[0][0, 0]) == pytest.approx(1.2e5, rel=1e-3)
    return [p.flatten().tolist() for p in ours]


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_what_is_rounded_on_its_way_is_the_same_on_all_ranks(kind: torch.dtype) -> None:
    first, second = on_ranks(2, _rounded, kind)
    assert first == second


def _exchanged(rank: int, way: str) -> None:
    use_transport(way)
    for kind, last in ((optim.Adam, 0), (optim.Adafactor, 9)):
        for shapes in (((600_000,), (5, 7), (3,)), ((5, 7), (3,), (last,), ())):
            ours, plain = pairs(*shapes)
            steps(ours, plain, memgraph.OSS(ours, kind), kind(plain))
    ours, plain = pairs((5, 7), (3,))
    sharded = memgraph.OSS(ours, optim.SGD, lr=0.1, wire_dtype=torch.bfloat16)
    give(ours, 0, 2, rank)
    give(plain, 0, 2)
    sharded.step()
    optim.SGD(plain, lr=0.1).step()
    torch.testing.assert_close(ours, plain, rtol=2**-7, atol=2**-8)
    every = [torch.empty(5, 7) for _ in range(2)]
    dist.all_gather(every, ours[0].detach())
    assert torch.equal(*every)


@pytest.mark.parametrize("way", ["shared_memory", "p2p", "collectives"])
def test_every_transport_gives_the_same(way: str) -> None:
    on_ranks(2, _exchanged, way)


def _rested(rank: int) -> list[tuple[Any, int, int]]:
    """For each phase what was measured, the forecast, and the bytes of this rank's states."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256), nn.ReLU(), nn.Linear(256, 8))
    optimizer = memgraph.OSS(module.parameters(), optim.AdamW, lr=1e-3)
    compiled, x, found = memgraph.compile(module, "100MB", optimizer=optimizer), torch.randn(32, 256), []
    for trained in (False, True, False):  # in buckets that they share with what is trained throughout
        for parameter in module[0].parameters():
            parameter.requires_grad_(trained)
        for _ in range(2):
            compiled(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        states = [value for state in optimizer.inner.state.values() for value in state.values()]
        found.append((compiled.plan.measured, compiled.plan.peak, sum(value.nbytes for value in states)))
    return found


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_plan_counts_the_states_of_what_was_trained_and_is_frozen_again(ranks: int) -> None:
    for phases in on_ranks(ranks, _rested):
        assert all(measured <= forecast for measured, forecast, _ in phases)
        (_, first, few), (_, _, all_of_them), (_, again, kept) = phases
        assert few < all_of_them == kept
        assert again >= first + kept - few
