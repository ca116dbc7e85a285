"""With `fuse_update` backward updates, training is the plain one's to the bit, and no set of gradients is ever there."""

from __future__ import annotations

import copy
import errno
import os
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import memgraph
from memgraph import far_update, planner, workers
from tests.seed.beside import given_up
from tests.streamed import OPTIMIZERS, TINY, Twins, assert_kept, batch, chain, facts, far, loss, same, streams
from tests.training import OPTIMIZERS as ALL_OPTIMIZERS

ROOM = 10**9
fused = partial(Twins, fuse_update=True)


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that an update of little takes several."""
    monkeypatch.setattr(far_update, "SMALLEST", 1 << 16)


def train(model: nn.Module, optimizer: Any, run: Any, x: Tensor | None = None) -> Tensor:
    """A step that leaves no gradients."""
    made = run(model, batch() if x is None else x)
    made.backward()
    if isinstance(model, memgraph.CompiledModule):
        assert all(parameter.grad is None for parameter in model.parameters())
    optimizer.step()
    optimizer.zero_grad()
    return made.detach()


def steps(twins: Twins, count: int = 5) -> None:
    for seed in range(count):
        twins.step(partial(train, x=batch(seed)))


@cache
def smallest(kind: str = "adamw", fuse_update: bool = True) -> int:
    """About the smallest budget."""
    model = chain()
    optimizer = OPTIMIZERS[kind](model.parameters())
    with pytest.raises(memgraph.BudgetError) as caught:
        given: dict[str, Any] = {"optimizer": optimizer, "loss": loss, "time_limit": 0, "fuse_update": fuse_update}
        memgraph.plan(model, batch(), budget=TINY, **given)
    return int(caught.value.smallest * 1.05)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("budget", ["room", "tight"])
def test_training_is_the_plain_one(kind: str, budget: str) -> None:
    twins = fused(kind=kind, budget=ROOM if budget == "room" else smallest(kind))
    steps(twins, 4)
    assert twins.model.plan.measured is not None
    assert bool(streams(twins.model)) == bool(far(twins.module, twins.ours))
    if kind != "sgd":  # of whose state a trip takes hardly anything away
        assert bool(streams(twins.model)) == (budget == "tight")


@pytest.mark.parametrize(
    "name", ["SGD nesterov", "SGD foreach", "AdamW fused amsgrad", "RMSprop foreach", "RAdam", "ASGD"]
)
def test_whatever_way_the_optimizer_has(name: str) -> None:
    steps(fused(kind=None, optimizer=lambda model: ALL_OPTIMIZERS[name](model.parameters()), budget=ROOM), 7)


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


@pytest.mark.parametrize("plan", ["room", "everything again"])
@pytest.mark.parametrize("make", [Shared, chain, partial(chain, 4, partial(nn.BatchNorm1d, 256))])
def test_models(make: Callable[[], nn.Module], plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if plan != "room":
        monkeypatch.setattr(planner, "make_plan", given_up)
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


# --- what is refused, before anything has changed


def scaled(model: Any, optimizer: Any) -> None:
    torch.amp.GradScaler("cpu", init_scale=4.0).scale(model(batch())).backward()


def accumulated(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(batch(1)).backward()


def closed(model: Any, optimizer: Any) -> None:
    optimizer.step(lambda: model(batch()).backward())


def retained(model: Any, optimizer: Any) -> None:
    model(batch()).backward(retain_graph=True)


def asked(model: Any, optimizer: Any) -> None:
    torch.autograd.grad(model(batch()), list(model.parameters()))


def some(model: Any, optimizer: Any) -> None:
    model(batch()).backward(inputs=[model[2].weight])


def hooked(model: Any, optimizer: Any) -> None:
    model[0].weight.register_hook(lambda gradient: gradient)
    model(batch()).backward()


def there(model: Any, optimizer: Any) -> None:
    model[0].weight.grad = torch.ones(256, 256)
    try:
        model(batch()).backward()
    finally:
        model[0].weight.grad = None


def together(model: Any, optimizer: Any) -> None:
    (model(batch(1)) + model(batch(2))).backward()


def looked_at(model: Any, optimizer: Any) -> None:
    optimizer.register_step_pre_hook(lambda *_: None)
    model(batch()).backward()


REFUSED: dict[Callable[[Any, Any], None], str] = {
    scaled: "GradScaler",
    retained: "retain_graph=True",
    asked: "torch.autograd.grad",
    some: "backward.inputs",
    hooked: "a hook",
    there: "zero_grad",
    together: "another call",
    closed: "closure",
    looked_at: "a hook before",
}


@pytest.mark.parametrize("do", REFUSED, ids=lambda do: do.__name__)
def test_what_wants_gradients_is_refused_and_nothing_has_changed(do: Callable[[Any, Any], None]) -> None:
    twins = fused(kind="momentum", budget=ROOM)
    steps(twins, 2)
    before = facts(twins.module, twins.ours)
    with pytest.raises(memgraph.FusedError, match=REFUSED[do]):
        do(twins.model, twins.ours)
    assert same(facts(twins.module, twins.ours), before)
    if do not in (hooked, looked_at):
        steps(twins, 2)


def test_accumulation_is_refused_at_the_second_backward() -> None:
    twins = fused(kind="momentum", budget=ROOM)
    twins.model(batch()).backward()
    before = facts(twins.module, twins.ours)
    with pytest.raises(memgraph.FusedError, match="can't accumulate"):
        accumulated(twins.model, twins.ours)
    assert same(facts(twins.module, twins.ours), before)


def test_clipping_is_refused() -> None:
    twins = fused(budget=ROOM)
    twins.model(batch()).backward()
    with pytest.raises(memgraph.FusedError, match="no gradient is left to clip"):
        twins.model.clip_grad_norm_(1.0)


def test_a_gradient_from_elsewhere_is_found_by_the_step() -> None:
    twins = fused(budget=ROOM)
    (twins.model(batch()) + twins.module[0].weight.square().sum()).backward()  # type: ignore[index]
    with pytest.raises(memgraph.FusedError, match="from outside of the model"):
        twins.ours.step()


def test_a_rate_that_changes_between_backward_and_step_is_found_by_the_step() -> None:
    twins = fused(budget=ROOM)
    twins.model(batch()).backward()
    twins.ours.param_groups[0]["lr"] = 0.5
    with pytest.raises(memgraph.FusedError, match="have been changed since backward"):
        twins.ours.step()


def test_a_loss_outside_of_the_step_is_refused() -> None:
    module = chain()
    model = memgraph.compile(module, ROOM, optimizer=torch.optim.SGD(module.parameters()), fuse_update=True)
    with pytest.raises(memgraph.FusedError, match="give loss="):
        model(batch())
    with torch.no_grad():
        assert torch.equal(model(batch()), module(batch()))


class Two(nn.Module):
    """Two losses, and what is looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.body = chain(2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out = self.body(x)
        return loss(out), out.abs().mean(), out


def test_of_several_losses_each_is_taken_as_it_is() -> None:
    torch.manual_seed(0)
    module = Two()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    plain = copy.deepcopy(module)
    model: Any = memgraph.compile(module, ROOM, optimizer=optimizer, fuse_update=True)
    with pytest.raises(memgraph.FusedError, match="nor left out"):
        model(batch())[0].backward()
    with pytest.raises(memgraph.FusedError, match="other than the scalar ones"):
        model(batch())[2].sum().backward()
    assert same(facts(module), facts(plain))
    one, other, _ = model(batch())
    (one + other).backward()
    optimizer.step()
    one, other, _ = plain(batch())
    (one + other).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    plain.zero_grad()
    assert same(facts(module), facts(plain))


def test_what_can_not_be_fused_is_refused_at_once() -> None:
    module = chain(1)
    with pytest.raises(ValueError, match="give optimizer="):
        memgraph.compile(module, ROOM, fuse_update=True)
    for optimizer in (torch.optim.LBFGS(module.parameters()), torch.optim.Adam(module.parameters(), capturable=True)):
        with pytest.raises(memgraph.FusedError, match="one parameter after the other"):
            memgraph.compile(module, ROOM, optimizer=optimizer, fuse_update=True)


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, after: int) -> Iterator[None]:
    """The disk refuses to write from some transfer on."""
    seen: list[int] = []
    transfer = workers.transfer

    def refuse(call: Any, *rest: Any) -> None:
        if call is os.pwritev:
            seen.append(1)
            if len(seen) > after:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        transfer(call, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(workers, "transfer", refuse)
        yield


@pytest.mark.parametrize("after", [0, 9])
def test_a_disk_that_fails_in_backward_says_what_is_updated(after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    twins = fused(kind="momentum", budget=smallest("momentum"))
    steps(twins, 2)
    model, optimizer = copy.deepcopy((twins.plain.state_dict(), twins.theirs.state_dict()))
    made = twins.model(batch())
    with failing(monkeypatch, after), pytest.raises(memgraph.SpillError) as caught:
        made.backward()
    assert "of 12 parameters have been updated" in "".join(caught.value.__notes__)
    assert all(parameter.grad is None for parameter in twins.module.parameters())
    twins.model.load_state_dict(model)
    twins.ours.load_state_dict(optimizer)
    steps(twins, 3)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_has_no_optimizer_and_ordinary_gradients(copied: Callable[[Any], Any]) -> None:
    twins = fused(kind="momentum", budget=smallest("momentum"))
    steps(twins, 2)
    before = facts(twins.module, twins.ours)
    other = copied(twins.model)
    other(batch()).backward()
    assert all(parameter.grad is not None for parameter in other.parameters())
    assert same(facts(twins.module, twins.ours), before)
    steps(twins, 2)


def test_parameters_may_be_bound_anew_and_changed_between_steps() -> None:
    twins = fused(kind="momentum", budget=smallest("momentum"))
    for turn in range(3):
        for model in (twins.plain, twins.module):
            with torch.no_grad():
                model[2].weight.mul_(0.5)  # type: ignore[index]
            model[4].weight.data = model[4].weight.detach() * 1.5  # type: ignore[index]
        twins.step(partial(train, x=batch(turn)))
    assert "parameter" in far(twins.module)


def test_a_parameter_that_the_optimizer_does_not_have_any_more_is_refused_by_name() -> None:
    twins = fused(kind="momentum", budget=ROOM)
    steps(twins, 1)
    twins.module.load_state_dict(copy.deepcopy(twins.module.state_dict()), assign=True)
    with pytest.raises(memgraph.FusedError, match="is no longer a parameter of the optimizer"):
        twins.model(batch()).backward()


def test_evaluation_changes_nothing() -> None:
    twins = fused(kind="momentum", budget=smallest("momentum"))
    steps(twins, 2)
    before = facts(twins.module, twins.ours)
    with torch.no_grad():
        twins.model(batch())
    twins.model(batch())  # and nobody goes back through it
    assert same(facts(twins.module, twins.ours), before)
    assert_kept(twins.model, twins.budget)
    steps(twins, 2)
