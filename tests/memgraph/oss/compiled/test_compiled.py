"""A compiled module with a sharded optimizer trains as the plain one does, and each rank keeps to its budget.

All of one kind is tried in one start of two ranks: what is returned is what went wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

import memgraph
from memgraph.errors import AgreementError, ShardError
from memgraph.oss.comm import shared_memory
from tests.support.distributed_loops import frozen, hooked, train, twice
from tests.support.ranks import on_ranks
from tests.support.smallest_budget import smallest_of

KINDS: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (optim.AdamW, {"lr": 0.01}),
    "momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
}
ROOM = 1 << 30
WIDTH = 24
BYTES = 1 << 15  # of a bucket: several of them


class Net(nn.Module):
    """A long parameter that has a bucket of its own, but for its end; short ones; one that is not read; a tied one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, WIDTH)
        self.first, self.long = nn.Linear(WIDTH, 700), nn.Linear(700, 401)
        self.last, self.head = nn.Linear(401, WIDTH), nn.Linear(WIDTH, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.unread = nn.Parameter(torch.ones(5))
        self.picture = nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.last(self.long(self.first(self.embedding(tokens)).tanh()).tanh())
        return nn.functional.cross_entropy(self.head(x), tokens) + self.picture.square().sum()


def batches(rank: int, alike: bool) -> Callable[[], Tensor]:
    generator = torch.Generator().manual_seed(1 if alike else 1 + rank)
    return lambda: torch.randint(50, (16,), generator=generator)


def same(ours: nn.Module, plain: nn.Module) -> bool:
    return all(map(torch.equal, ours.parameters(), plain.parameters()))


def compiled(budget: int = ROOM, kind: str = "AdamW") -> tuple[Net, Any, memgraph.OSS]:
    net, (cls, options) = Net(), KINDS[kind]
    optimizer = memgraph.OSS(net.parameters(), cls, bucket_bytes=BYTES, **options)
    return net, memgraph.compile(net, budget, optimizer=optimizer, time_limit=0.0), optimizer


def smallest(kind: str) -> int:
    return smallest_of(lambda: compiled(1000, kind)[1](batches(0, True)()))


def _trainings(rank: int) -> tuple[list[str], list[str]]:
    wrong, plans = [], []
    for kind, budget, times in (("AdamW", ROOM, 1), ("momentum", smallest("momentum"), 2)):
        shared_memory.LEAST = (
            0 if kind == "momentum" else shared_memory.LEAST
        )  # so that all buckets are read, where that is allowed
        cls, options = KINDS[kind]
        plain, (ours, model, optimizer) = Net(), compiled(budget, kind)
        train(plain, cls(plain.parameters(), **options), batches(rank, True), times=times)
        train(model, optimizer, batches(rank, True), times=times)
        report = model.plan
        kept = report.measured is not None and report.measured <= report.peak <= budget
        wrong += [f"{kind} {budget} {times}: {report}"] * (not same(ours, plain) or not kept)
        wrong += [f"{kind} has no shards"] * (not any(what == "shard" for what, _ in report.forecast.trace.outputs))
        plans += [str(report.forecast.trace)]
    return wrong, plans


@pytest.mark.long
def test_trainings_are_the_plain_ones_and_keep_to_their_budgets_with_one_plan() -> None:
    (wrong, plans), (others, theirs) = on_ranks(2, _trainings)
    assert wrong == others == []
    assert plans == theirs


def begun_again(compiled: tuple[Net, Any, memgraph.OSS]) -> tuple[Net, Any, memgraph.OSS]:
    """The same, with parameters as new and without a state; what was planned is kept."""
    net, _, optimizer = compiled
    optimizer.zero_grad()
    optimizer.inner.state.clear()
    net.load_state_dict(Net().state_dict())
    return compiled


def _averages(rank: int, once: tuple[Net, Any, memgraph.OSS]) -> bool:
    """Against torch's own optimizer, of gradients that are averaged by hand, those of each backward for themselves."""
    plain, (ours, model, optimizer) = Net(), begun_again(once)
    cls, options = KINDS["AdamW"]
    by_hand, batch, again = cls(plain.parameters(), **options), batches(rank, False), batches(rank, False)
    for times in (1, 2, 1):
        sums: dict[Tensor, Tensor] = {}
        for _ in range(times):
            plain(batch()).backward()
            for parameter in plain.parameters():
                gradient: Tensor | None = parameter.grad
                if gradient is not None:
                    parameter.grad = None
                    dist.all_reduce(gradient)
                    gradient /= 2
                    sums[parameter] = sums[parameter].add_(gradient) if parameter in sums else gradient
        for owner, total in sums.items():
            owner.grad = total
        by_hand.step()
        by_hand.zero_grad()
        train(model, optimizer, again, steps=1, times=times)
    return same(ours, plain)


def _loops(rank: int, once: tuple[Net, Any, memgraph.OSS]) -> list[str]:
    """Run common loops around backward and step."""

    def zeroed(model: Any, optimizer: Any, batch: Any, module: nn.Module) -> None:
        model(batch()).backward()
        optimizer.zero_grad(set_to_none=False)
        model(batch()).backward()
        optimizer.step()

    def by_module(model: Any, optimizer: Any, batch: Any, module: nn.Module) -> None:
        model(batch()).backward()
        module.zero_grad()
        loss = model(batch())
        loss.backward()
        optimizer.step()

    def one_gone(model: Any, optimizer: Any, batch: Any, module: Any) -> None:
        model(batch()).backward()
        module.long.weight.grad = None
        module.last.bias.grad.zero_()
        optimizer.step()

    def outside(model: Any, optimizer: Any, batch: Any, module: Any) -> None:
        module.unread.square().sum().backward()
        model(batch()).backward()
        optimizer.step()

    def kept(model: Any, optimizer: Any, batch: Any, module: Any) -> None:
        loss = model(batch())
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()

    def evaluated(model: Any, optimizer: Any, batch: Any, module: Any) -> None:
        train(model, optimizer, batch, 1)
        with torch.no_grad():
            if rank == 0:
                model(batch())
            else:
                batch()
        train(model, optimizer, batch, 1)

    wrong = []
    for loop in (twice, zeroed, by_module, one_gone, frozen, outside, hooked, kept, evaluated):
        plain, (ours, model, optimizer) = Net(), begun_again(once)
        cls, options = KINDS["AdamW"]
        for _ in range(2):
            loop(plain, theirs := cls(plain.parameters(), **options), batches(rank, True), plain)
            theirs.zero_grad()
            optimizer.inner.state.clear()  # as theirs, which is new
            loop(model, optimizer, batches(rank, True), ours)
            optimizer.zero_grad()
        wrong += [loop.__name__] * (not same(ours, plain))
    return wrong


def _rounded(rank: int) -> bool:
    """Two calls in one backward, and a norm: sums are made in another order."""
    plain, (ours, model, optimizer) = Net(), compiled(kind="momentum")
    cls, options = KINDS["momentum"]
    for of, theirs in ((plain, cls(plain.parameters(), **options)), (model, optimizer)):
        batch = batches(rank, True)
        (of(batch()) + of(batch())).backward()
        if of is plain:
            nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        else:
            model.clip_grad_norm_(0.1)
        theirs.step()
    return all(map(torch.allclose, ours.parameters(), plain.parameters()))


class Two(nn.Module):
    """Two losses, each of a parameter of its own and of one that both read."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.both, self.left, self.right = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.both(x)
        return self.left(x).square().mean(), self.right(x).square().mean()


def _one_loss(rank: int) -> bool:
    """Parameters that only the other loss reads have no gradient, and so no weight decay."""
    plain, ours = Two(), Two()
    theirs = optim.AdamW(plain.parameters(), lr=0.1, weight_decay=0.5)
    optimizer = memgraph.OSS(ours.parameters(), lr=0.1, weight_decay=0.5)
    model = memgraph.compile(ours, ROOM, optimizer=optimizer)
    for _ in range(3):
        for of, one in ((plain, theirs), (model, optimizer)):
            of(torch.ones(2, 6))[0].backward()
            one.step()
            one.zero_grad()
    return same(ours, plain) and torch.equal(ours.right.weight, Two().right.weight)


def _everyday(rank: int) -> tuple[bool, list[str], bool, bool]:
    once = compiled()
    return _averages(rank, once), _loops(rank, once), _rounded(rank), _one_loss(rank)


@pytest.mark.long
def test_averages_and_everyday_loops_are_the_plain_ones() -> None:
    assert on_ranks(2, _everyday) == [(True, [], True, True)] * 2


def _refused(rank: int) -> None:
    net, model, optimizer = compiled()
    batch = batches(rank, True)
    with pytest.raises(ShardError, match="is wanted elsewhere"):
        torch.autograd.grad(model(batch()), list(net.parameters())[:2], allow_unused=True)
    model(batch()).backward()
    with pytest.raises(RuntimeError, match="more than one element"):
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    with pytest.raises(RuntimeError, match="more than one element"):
        net.first.weight.sum().backward()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(RuntimeError, match="more than one element"):
        scaler.step(optimizer)
    ours = memgraph.GradScaler("cpu")
    ours.scale(torch.ones(()))
    with pytest.raises(ShardError, match="which a GradScaler can't see: train without one"):
        ours.step(optimizer)
    optimizer.zero_grad()
    net.first.weight.sum().backward()
    loss = model(batch())
    with pytest.raises(ShardError, match="has a gradient from outside"):
        loss.backward()


def _apart(rank: int) -> None:
    """Ranks that do not make the same calls."""
    _, model, _ = compiled()
    with pytest.raises(AgreementError, match=r"disagree on line \d+ of the step: .*i64\[4\].*rank 0.*i64\[5\].*rank 1"):
        model(torch.zeros(4 + rank, dtype=torch.int64))
    model(torch.zeros(4, dtype=torch.int64)).backward()
    model.zero_grad()
    with pytest.raises(AgreementError, match=rf"rank {rank} is about to run a .*ranks \[{1 - rank}\]"):
        model(torch.zeros(4 + rank, dtype=torch.int64)).backward()
    model(torch.zeros(4, dtype=torch.int64)).backward()


def _both(rank: int) -> None:
    _refused(rank)
    _apart(rank)


@pytest.mark.long
def test_what_can_not_be_is_refused_on_all_ranks() -> None:
    on_ranks(2, _both)


def _alone(rank: int) -> bool:
    plain, (ours, model, optimizer) = Net(), compiled()
    cls, options = KINDS["AdamW"]
    train(plain, cls(plain.parameters(), **options), batches(0, True))
    train(model, optimizer, batches(0, True))
    report = model.plan
    assert report.measured is not None and report.measured <= report.peak
    return same(ours, plain)


def test_one_rank_reduces_nothing() -> None:
    assert on_ranks(1, _alone) == [True]


def _elsewhere(rank: int) -> list[bool]:
    """Parameters that move, become others, and go another way."""
    found = []
    plain, (ours, model, optimizer) = Net().double(), compiled()
    model(batches(rank, True)())
    ours.double()
    cls, options = KINDS["AdamW"]
    for of, theirs in ((plain, cls(plain.parameters(), **options)), (model, optimizer)):
        train(of, theirs, batches(rank, True), 1)
        for parameter in of.parameters():
            parameter.data = parameter.data.clone()
        train(of, theirs, batches(rank, True), 1)
    found.append(same(ours, plain))
    for wire in (torch.bfloat16, torch.float16):
        nets = Net(), Net()
        for compile, net in enumerate(nets):
            rounded = memgraph.OSS(net.parameters(), cls, bucket_bytes=BYTES, wire_dtype=wire, **options)
            sent: Any = memgraph.compile(net, ROOM, optimizer=rounded, time_limit=0.0) if compile else net
            train(sent, rounded, batches(rank, False), 2)
            if sent is not net:
                report = sent.plan
                assert report.measured is not None and report.measured <= report.peak, str(report)
        found.append(same(*nets))
    return found


@pytest.mark.long
def test_parameters_move_and_are_rounded_on_their_way_as_without_a_compiled_module() -> None:
    assert on_ranks(2, _elsewhere) == [[True] * 3] * 2
