"""A compiled module whose next forward gathers what a step has updated: the plain training, to the bit.

All of one kind is tried in one start of two ranks: what is returned is what went wrong.
"""

from __future__ import annotations

import copy
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn, optim

import memgraph
from memgraph.errors import AgreementError, CollectiveError, ShardError
from memgraph.oss.compiled.insert_all_gather import forward_buckets
from memgraph.oss.pending_gathers import ForwardGather
from memgraph.profile.memory_meter import measure_peak
from tests.memgraph.oss.compiled.test_compiled import BYTES, KINDS, ROOM, Net, batches, same
from tests.support.distributed_loops import frozen, hooked, train, twice
from tests.support.ranks import on_ranks
from tests.support.smallest_budget import smallest_of

Compiled = tuple[Net, Any, memgraph.OSS]
SECONDS = 6.0


def compiled(budget: int = ROOM, kind: str = "AdamW", shared: bool = False, **options: Any) -> Compiled:
    """A module whose forward gathers: by messages, or as ranks that read each other's memory."""
    net, (cls, given) = Net(), KINDS[kind]
    optimizer = memgraph.OSS(net.parameters(), cls, bucket_bytes=BYTES, gather="forward", **given, **options)
    optimizer.comm.shared_memory = optimizer.comm.shared_memory if shared else None
    return net, memgraph.compile(net, budget, optimizer=optimizer, time_limit=0.0), optimizer


def smallest(kind: str) -> int:
    return smallest_of(lambda: compiled(1000, kind)[1](batches(0, True)()))


def plainly(kind: str = "AdamW", **given: Any) -> tuple[Net, optim.Optimizer]:
    net, (cls, options) = Net(), KINDS[kind]
    return net, cls(net.parameters(), **options, **given)


def measured_anew(model: Any) -> None:
    """Let the next step be measured, as the first one was, which had nothing to gather."""
    step = model._latest
    step.report = replace(step.report, measured=None)


def _training(rank: int) -> tuple[str, str]:
    """Under the least budget, with two backwards for each step; what went wrong, and the plan."""
    kind, budget = "momentum", smallest("momentum")
    plain, theirs = plainly(kind)
    ours, model, optimizer = compiled(budget, kind)
    train(plain, theirs, batches(rank, True), 5, 2)
    batch = batches(rank, True)
    train(model, optimizer, batch, 3, 2)
    assert optimizer.pending_gathers.buckets == set(range(len(optimizer.layout.buckets)))
    measured_anew(model)
    train(model, optimizer, batch, 2, 2)
    optimizer.gather()
    report = model.plan
    assert "memgraph.gathered" in str(report.forecast.trace)
    kept = report.measured is not None and report.measured <= report.peak <= budget
    return "" if same(ours, plain) and kept else str(report), str(report.forecast.trace)


@pytest.mark.long
def test_a_training_is_the_plain_one_and_keeps_to_its_budget_with_one_plan() -> None:
    (wrong, plan), (other, theirs) = on_ranks(2, _training)
    assert wrong == other == ""
    assert plan == theirs


def _between(rank: int, folder: Path) -> None:
    """Check which operations are allowed before parameters are gathered."""
    plain, theirs = plainly()
    ours, model, optimizer = compiled()
    batch = batches(rank, True)
    train(plain, theirs, batches(rank, True), 2)
    train(model, optimizer, batch, 2)
    for bucket in optimizer.layout.buckets:
        for other, views in enumerate(bucket.views):
            assert all(view.isnan().all() == (other != rank) for view in views if view.numel())
    with pytest.raises(ShardError, match=r"state_dict\(\) reads parameters 0 to .* call optimizer.gather\(\) before"):
        model.state_dict()
    with pytest.raises(ShardError, match="a copy reads"):
        copy.deepcopy(model)
    for of in (ours, model):
        with pytest.raises(ShardError, match=r"save_state reads|state_dict\(\) reads"):
            memgraph.save_state(folder / f"{rank}.pt", of, optimizer)
    tokens = batch()
    with pytest.raises(ShardError, match="this call reads parameters"), torch.no_grad():
        model(tokens)
    optimizer.consolidate_state_dict(None)  # of what is this rank's own
    state = optimizer.state_dict()["state"]
    assert all(torch.equal(state[i]["exp_avg"], one["exp_avg"]) for i, one in theirs.state_dict()["state"].items())
    for one in forward_buckets(optimizer, dict(ours.named_parameters())):
        _, taken = measure_peak(ForwardGather(optimizer.pending_gathers, [one.bucket]).all)
        assert taken is not None and taken.peak <= one.room
    optimizer.gather()  # finds nothing to do
    assert same(ours, plain) and all(map(torch.equal, model.state_dict().values(), plain.state_dict().values()))
    with torch.no_grad():
        assert rank == 0 or torch.equal(model(tokens), plain(tokens)), "one rank may look by itself"
    memgraph.save_state(folder / f"{rank}.pt", model, optimizer)
    train(model, optimizer, batches(rank, True), 1)
    memgraph.load_state(folder / f"{rank}.pt", model, optimizer)
    train(plain, theirs, batches(rank, True), 1)
    train(model, optimizer, batches(rank, True), 1)
    memgraph.save_sharded(folder / "run", model, optimizer)  # gathers
    train(model, optimizer, batches(rank, True), 1)
    optimizer.sharded_step.is_half_updated = True
    with pytest.raises(ShardError, match="a step failed when some parameters were updated"):
        optimizer.gather()
    memgraph.load_sharded(folder / "run", model, optimizer)  # mends that
    assert same(ours, plain)
    train(plain, theirs, batches(rank, True), 1)
    train(model, optimizer, batches(rank, True), 1)
    optimizer.gather()
    assert same(ours, plain)


def _loops(rank: int) -> list[str]:
    """Run common loops twice, because the second begins with parameters that the first left to be gathered."""

    def kinds_of_calls(model: Any, optimizer: Any, batch: Any, module: Any) -> None:
        for count in (16, 5, 16):
            model(batch()[:count]).backward()
            optimizer.step()
            optimizer.zero_grad()

    def forward_alone(model: Any, optimizer: Any, batch: Any, module: Any) -> None:
        model(batch())
        train(model, optimizer, batch, 1, times=2)

    def bound_anew(model: Any, optimizer: Any, batch: Any, module: Any) -> None:
        train(model, optimizer, batch, 1)
        for parameter in module.parameters():
            parameter.data = parameter.data.clone()
        train(model, optimizer, batch, 1)

    def scaled(model: Any, optimizer: Any, batch: Any, module: Any) -> None:
        train(model, optimizer, batch, 1)
        with torch.no_grad():  # of each element by itself: so it is right before and after
            for parameter in module.parameters():
                parameter.mul_(0.5)
        train(model, optimizer, batch, 1)

    wrong = []
    for shared, loops in (
        (False, (frozen, kinds_of_calls, twice, forward_alone)),
        (True, (hooked, bound_anew, scaled)),
    ):
        plain, theirs = plainly()
        ours, model, optimizer = compiled(shared=shared)
        for loop in loops:
            for of, one, module in ((plain, theirs, plain), (model, optimizer, ours)):
                batch = batches(rank, True)
                loop(of, one, batch, module)
                one.zero_grad()
                loop(of, one, batch, module)
                one.zero_grad()
            optimizer.gather()
            wrong += [loop.__name__] * (not same(ours, plain))
    return wrong


def _apart(rank: int) -> None:
    """Ranks that do not make the same calls are told, and go on."""
    ours, model, optimizer = compiled()
    batch = batches(rank, True)
    train(model, optimizer, batch, 2)
    with pytest.raises(AgreementError, match=rf"rank {rank} is about to run a .*ranks \[{1 - rank}\]"):
        if rank:
            optimizer.gather()
        else:
            model(batch())
    with pytest.raises(IndexError, match="out of range"):
        model(torch.full((16,), 1000))
    optimizer.gather()
    assert not any(parameter.isnan().any() for parameter in ours.parameters())


def _others(rank: int) -> list[bool]:
    """Whole parameters of owners; what is rounded on its way; parameters of another module beside the compiled one's."""
    found = []
    for kind, wire in ((optim.Adafactor, None), (optim.AdamW, torch.bfloat16)):
        nets, batch = (Net(), Net()), batches(rank, False)
        given: dict[str, Any] = {"bucket_bytes": BYTES, "lr": 0.01, "wire_dtype": wire}
        train(nets[0], memgraph.OSS(nets[0].parameters(), kind, **given), batches(rank, False), 3)
        one = memgraph.OSS(nets[1].parameters(), kind, gather="forward", **given)
        model = memgraph.compile(nets[1], ROOM, optimizer=one, time_limit=0.0)
        train(model, one, batch, 2)
        measured_anew(model)
        train(model, one, batch, 1)
        one.gather()
        report = model.plan
        found += [same(*nets), report.measured is not None and report.measured <= report.peak]
    both, alone = Both(), Both()
    by_hand: optim.Optimizer = optim.AdamW(alone.parameters(), lr=0.1)
    optimizer = memgraph.OSS(both.parameters(), lr=0.1, gather="forward")
    half = memgraph.compile(both.left, ROOM, optimizer=optimizer, time_limit=0.0)
    for _ in range(3):
        for left, right, stepped in ((alone.left, alone.right, by_hand), (half, both.right, optimizer)):
            right(left(torch.ones(2, 600))).square().mean().backward()
            stepped.step()
            stepped.zero_grad()
    optimizer.gather()
    found.append(same(both, alone))
    return [*found, _in_parts(), _given(its_own=True), _given(its_own=False)]


def _in_parts() -> bool:
    """A new kind of call, which is tried with the parameters' numbers before it is planned: they have to be there."""
    nets = Given(), Given()
    for net, gather in zip(nets, ("step", "forward"), strict=True):
        one = memgraph.OSS(net.parameters(), gather=gather)
        model = memgraph.compile(net, ROOM, optimizer=one, time_limit=0.0, microbatches=2, reduction="mean")
        for count in (4, 8):
            memgraph.plan(net, torch.ones(count, 6), torch.eye(6), budget=ROOM, optimizer=one)
            assert not one.pending_gathers.buckets
            model(torch.ones(count, 6), torch.eye(6)).backward()
            one.step()
            one.zero_grad()
        one.gather()
    return same(*nets)


class Given(nn.Module):
    """Is given its own weight a second time, and has another one twice; the graph does not know them for the same."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.other = nn.Parameter(torch.eye(6)), nn.Parameter(torch.eye(6))
        self.seen = [self.other.detach()]

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return ((x @ self.seen[0]).cos() @ self.other + (x @ weight).sin() @ self.weight).square().mean()


def _given(its_own: bool) -> bool:
    plain, ours = Given(), Given()
    theirs: optim.Optimizer = optim.AdamW(plain.parameters(), lr=0.1)
    optimizer = memgraph.OSS(ours.parameters(), lr=0.1, gather="forward")
    model = memgraph.compile(ours, ROOM, optimizer=optimizer)
    for _ in range(3):
        for of, module, one in ((plain, plain, theirs), (model, ours, optimizer)):
            of(torch.ones(2, 6), module.weight.detach() if its_own else torch.eye(6)).backward()
            one.step()
            one.zero_grad()
    optimizer.gather()
    return same(plain, ours)


class Both(nn.Module):
    """Two halves, each of a long parameter and a short one: the short ones are sent together."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(600, 600), nn.Linear(600, 600)

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


def _all(rank: int, folder: Path) -> tuple[list[str], list[bool]]:
    _between(rank, folder)
    _apart(rank)
    return _loops(rank), _others(rank)


@pytest.mark.long
def test_nothing_stale_is_read_and_everyday_loops_are_the_plain_ones(tmp_path: Path) -> None:
    assert on_ranks(2, _all, tmp_path) == [([], [True] * 8)] * 2


def test_what_can_not_be_left_to_forward_is_refused() -> None:
    on_ranks(1, _refused)


def _refused(rank: int) -> None:
    parameters = [nn.Parameter(torch.ones(8))]
    refused: list[tuple[dict[str, Any], str]] = [
        ({"gather": "later"}, "give one of 'step', 'forward'"),
        ({"bucket_bytes": "4MB"}, "bucket_bytes is a str, '4MB'; give a number of bytes"),
        ({"bucket_bytes": 0}, "bucket_bytes=0; give a number of bytes"),
        ({"gather": "forward", "optim": optim.LBFGS}, "LBFGS evaluates losses in its step"),
        ({"gather": "forward", "wire_dtype": torch.float16}, "float16 may have to be sent a second time"),
    ]
    for options, match in refused:
        with pytest.raises(ShardError, match=match):
            memgraph.OSS(parameters, **options)
    int_of_numpy: Any = np.int64(1 << 20)
    optimizer = memgraph.OSS(parameters, lr=0.1, gather="forward", bucket_bytes=int_of_numpy)
    parameters[0].grad = torch.ones(8)
    optimizer.step()
    optimizer.gather()
    assert not parameters[0].isnan().any()


def _three(rank: int) -> bool:
    """As with steps that gather: a mean of three is not that of one."""
    nets = Net(), Net()
    for net, gather in zip(nets, ("step", "forward"), strict=True):
        one = memgraph.OSS(net.parameters(), bucket_bytes=BYTES, gather=gather)
        train(memgraph.compile(net, ROOM, optimizer=one, time_limit=0.0), one, batches(rank, False), 3)
        one.gather()
    return same(*nets)


@pytest.mark.slow
def test_three_ranks_gather_uneven_parts() -> None:
    assert on_ranks(3, _three) == [True] * 3


def _left_alone(rank: int) -> str:
    _, model, optimizer = compiled()
    train(model, optimizer, batches(rank, True), 2)
    if rank == 1:
        time.sleep(10 * SECONDS)
    with pytest.raises(CollectiveError) as caught:
        optimizer.gather()
    return f"{caught.value.collective} {caught.value.ranks}"


@pytest.mark.slow
def test_a_rank_that_gathers_alone_names_the_one_that_does_not_come() -> None:
    assert on_ranks(2, _left_alone, seconds=SECONDS, lost=[1]) == ["comparison of steps (1,)", None]
