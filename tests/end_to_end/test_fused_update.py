"""With `fuse_update` backward updates, training is the plain one's to the bit, and no set of gradients is ever there."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import memgraph
from memgraph.planning import search
from tests.support.fused_updates import ROOM, fused, smallest, steps, train
from tests.support.seed_modules import given_up
from tests.support.streamed_state import OPTIMIZERS, Twins, batch, chain, facts, far, loss, same, streams
from tests.support.windowed_training import OPTIMIZERS as ALL_OPTIMIZERS

pytestmark = pytest.mark.usefixtures("small_windows")


@pytest.mark.long
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("budget", ["room", "tight"])
def test_training_is_the_plain_one(kind: str, budget: str) -> None:
    twins = fused(kind=kind, budget=ROOM if budget == "room" else smallest(kind))
    steps(twins, 4)
    assert twins.model.plan.measured is not None
    assert bool(streams(twins.model)) == bool(far(twins.module, twins.ours))
    if kind != "sgd":  # of whose state a trip takes hardly anything away
        assert bool(streams(twins.model)) == (budget == "tight")


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["SGD nesterov", "SGD foreach", "AdamW fused amsgrad", "RMSprop foreach", "RAdam", "ASGD"]
)
def test_whatever_way_the_optimizer_has(name: str) -> None:
    steps(fused(kind=None, optimizer=lambda model: ALL_OPTIMIZERS[name](model.parameters()), budget=ROOM), 7)


@pytest.mark.long
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_peak_falls_by_the_gradients(kind: str) -> None:
    """All but one of them, and what updates of others would take meanwhile."""
    plain, twins = Twins(kind=kind, budget=ROOM), fused(kind=kind, budget=ROOM)
    for one, do in ((plain, None), (twins, train)):
        one.step(do)
    sizes = [parameter.nbytes for parameter in twins.module.parameters()]
    before, after = plain.model.plan, twins.model.plan
    assert before.peak - after.peak >= sum(sizes) - 2 * max(sizes)
    assert before.measured is not None and after.measured is not None
    assert before.measured - after.measured >= sum(sizes) - 2 * max(sizes)
    assert after.forecast.by_kind["gradient"].max() == 0


def test_the_smallest_budget_is_smaller() -> None:
    assert smallest() < smallest(fuse_update=False)


def test_updates_stand_in_backward_behind_the_last_use() -> None:
    twins = fused(budget=ROOM)
    steps(twins, 1)
    ops = twins.model.plan.forecast.trace.ops
    updates = [i for i, op in enumerate(ops) if op.phase == "update"]
    assert [ops[i].fn for i in updates] == ["AdamW.step"] * 12
    first = next(op for op in ops[updates[0] :] if op.phase == "backward")
    assert ops.index(first) < updates[-1]
    for i in updates:
        weight = next(read for read in ops[i].reads if not read.startswith(("optimizer", "mm", "view", "sum")))
        assert not any(weight in op.reads for op in ops[i + 1 :])


class Shared(nn.Module):
    """One weight twice, one that nothing reads, one that is read as it is and by nothing in backward, dropout and
    statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(256, 256), nn.Linear(256, 256, bias=False)
        self.last.weight = self.first.weight
        self.unread, self.shift = nn.Linear(256, 256), nn.Parameter(torch.zeros(256))
        self.norm, self.drop = nn.BatchNorm1d(256), nn.Dropout(0.3)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.norm(self.first(x)).relu()) + self.shift
        out: Tensor = self.last(h) * self.scale
        return out


@pytest.mark.long
@pytest.mark.parametrize("plan", ["room", "everything again"])
@pytest.mark.parametrize("make", [Shared, chain, partial(chain, 4, partial(nn.BatchNorm1d, 256))])
def test_models(make: Callable[[], nn.Module], plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if plan != "room":
        monkeypatch.setattr(search, "make_plan", given_up)
    steps(fused(make, kind="momentum", budget=ROOM), 3)


def test_a_loss_that_is_a_parameter_alone() -> None:
    """Its gradient is what backward begins with."""

    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.tensor(2.0))

        def forward(self, x: Tensor) -> Tensor:
            return self.w + x.sum() * 0

    def run(compiled: bool) -> float:
        module = Alone()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        model: Any = memgraph.compile(module, ROOM, optimizer=optimizer, fuse_update=True) if compiled else module
        for _ in range(3):
            model(batch()).backward()
            optimizer.step()
            optimizer.zero_grad()
        return float(module.w.detach())

    assert run(True) == run(False) == 0.5


SCHEDULERS: dict[str, Callable[[Any], lr_scheduler.LRScheduler]] = {
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, [0.1, 0.2], total_steps=20),
}


@pytest.mark.parametrize("after", [False, True], ids=["built before", "built after"])
@pytest.mark.parametrize("schedule", SCHEDULERS)
def test_schedules_and_groups(schedule: str, after: bool) -> None:
    found: list[Any] = []
    for compiled in (False, True):
        module = chain(3)
        biases = [p for p in module.parameters() if p.dim() == 1]
        groups: list[dict[str, Any]] = [
            {"params": [p for p in module.parameters() if p.dim() > 1]},
            {"params": biases, "momentum": 0.5},
        ]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        scheduler = None if after else SCHEDULERS[schedule](optimizer)
        model: Any = module
        if compiled:
            model = memgraph.compile(module, ROOM, optimizer=optimizer, loss=loss, fuse_update=True)
        scheduler = scheduler or SCHEDULERS[schedule](optimizer)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for seed in range(4):
                made = model(batch(seed))
                (made if compiled else loss(made)).backward()
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
        found.append((facts(module, optimizer), scheduler.get_last_lr(), scheduler.last_epoch))
    assert found[0][1:] == found[1][1:]
    assert same(found[0][0], found[1][0])


def test_parameters_are_frozen_thawed_and_added() -> None:
    twins = fused(budget=ROOM)
    for turn in range(4):
        for model in (twins.plain, twins.module):
            model[2].weight.requires_grad_(turn % 2 == 0)  # type: ignore[index]
        twins.step(partial(train, x=batch(turn)))
    for model, optimizer in ((twins.plain, twins.theirs), (twins.module, twins.ours)):
        torch.manual_seed(3)
        model.append(nn.Linear(256, 256))  # type: ignore[operator]
        optimizer.add_param_group({"params": list(model[-1].parameters()), "lr": 0.5})  # type: ignore[index]
    steps(twins, 2)


def test_what_the_optimizer_does_not_own_has_its_gradient() -> None:
    module: Any = chain(2)
    plain: Any = chain(2)
    optimizer = torch.optim.SGD(module[0].parameters(), lr=0.1)
    model = memgraph.compile(module, ROOM, optimizer=optimizer, loss=loss, fuse_update=True)
    model(batch()).backward()
    loss(plain(batch())).backward()
    assert module[0].weight.grad is None
    grads = [parameter.grad for parameter in module[2].parameters()]
    assert same(list(grads), [parameter.grad for parameter in plain[2].parameters()])
