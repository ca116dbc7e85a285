"""`fuse_update` refuses what it can't do before anything has changed; failures, copies and changes in between."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memgraph
from memgraph.optim.fused_update import FusedUpdate
from tests.support.faults import failing
from tests.support.fused_updates import ROOM, fused, smallest, steps, train
from tests.support.streamed_state import assert_kept, batch, chain, facts, far, loss, same

pytestmark = pytest.mark.usefixtures("small_windows")


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


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.parametrize("after", [0, 9])
def test_a_disk_that_fails_in_backward_says_what_is_updated(after: int) -> None:
    twins = fused(kind="momentum", budget=smallest("momentum"))
    steps(twins, 2)
    model, optimizer = copy.deepcopy((twins.plain.state_dict(), twins.theirs.state_dict()))
    made = twins.model(batch())
    with failing("pwritev", after=after), pytest.raises(memgraph.SpillError) as caught:
        made.backward()
    assert "of 12 parameters have been updated" in "".join(caught.value.__notes__)
    assert all(parameter.grad is None for parameter in twins.module.parameters())
    twins.model.load_state_dict(model)
    twins.ours.load_state_dict(optimizer)
    steps(twins, 3)


@contextmanager
def interrupted(monkeypatch: pytest.MonkeyPatch, after: int) -> Iterator[None]:
    """Ctrl-C after so many updates."""
    seen: list[int] = []
    update = FusedUpdate._update

    def stop(self: FusedUpdate, *given: Any) -> None:
        if len(seen) == after:
            raise KeyboardInterrupt
        seen.append(1)
        update(self, *given)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(FusedUpdate, "_update", stop)
        yield


@pytest.mark.long
@pytest.mark.parametrize("after", [1, 5, 11])
def test_nothing_runs_after_a_partial_update_until_a_state_is_loaded(
    after: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    twins = fused(kind="momentum", budget=ROOM)
    steps(twins, 2)
    memgraph.save_state(tmp_path / "run.pt", twins.module, twins.ours)
    model, optimizer = copy.deepcopy((twins.plain.state_dict(), twins.theirs.state_dict()))
    made = twins.model(batch(2))
    with interrupted(monkeypatch, after):
        made.backward()
    torn = facts(twins.module, twins.ours)
    forward = partial(twins.model, batch())
    save = partial(memgraph.save_state, tmp_path / "run.pt", twins.model, twins.ours)
    words = f"{after} of 12 parameters have been updated.*load_state"
    for do in (forward, torch.no_grad()(forward), twins.ours.step, save, forward):
        with pytest.raises(memgraph.FusedError, match=words):
            do()
    assert same(facts(twins.module, twins.ours), torn)
    if after == 5:
        memgraph.load_state(tmp_path / "run.pt", twins.model, twins.ours)
    else:
        twins.ours.load_state_dict(optimizer)
        with pytest.raises(memgraph.FusedError, match=words):
            forward()
        with pytest.raises(RuntimeError, match="Missing key"):
            twins.module.load_state_dict({})
        with pytest.raises(memgraph.FusedError, match=words):
            forward()
        narrow = {name: value[:1] if name == "10.bias" else value for name, value in model.items()}
        holder = nn.ModuleDict({"inside": twins.model})
        for whole, prefix in ((twins.module, ""), (twins.model, ""), (holder, "inside.")):
            with pytest.raises(RuntimeError, match="size mismatch"):
                whole.load_state_dict({f"{prefix}{name}": value for name, value in narrow.items()})
            with pytest.raises(memgraph.FusedError, match=words):
                forward()
        holder.load_state_dict({f"inside.{name}": value for name, value in model.items()})
    assert not twins.module._load_state_dict_post_hooks and not twins.module._load_state_dict_pre_hooks
    steps(twins, 2)


def test_ctrl_c_before_the_first_update_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = fused(kind="momentum", budget=ROOM)
    steps(twins, 2)
    made = twins.model(batch())
    with interrupted(monkeypatch, 0):
        made.backward()
    steps(twins, 2)


def test_a_copy_of_a_partially_updated_module_is_not_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = fused(kind="momentum", budget=ROOM)
    made = twins.model(batch())
    with interrupted(monkeypatch, 3):
        made.backward()
    for other in (copy.deepcopy(twins.module), pickle.loads(pickle.dumps(twins.module))):
        other.load_state_dict(twins.plain.state_dict())
    twins.ours.load_state_dict(twins.theirs.state_dict())
    with pytest.raises(memgraph.FusedError, match="3 of 12"):
        twins.model(batch())
    twins.model.load_state_dict(twins.plain.state_dict())
    steps(twins, 2)


@pytest.mark.parametrize("whole", [True, False])
def test_what_is_loaded_between_backward_and_step_is_a_fresh_start(whole: bool, tmp_path: Path) -> None:
    twins = fused(kind="momentum", budget=ROOM)
    steps(twins, 2)
    memgraph.save_state(tmp_path / "run.pt", twins.module, twins.ours)
    twins.model(batch()).backward()
    if whole:
        memgraph.load_state(tmp_path / "run.pt", twins.model, twins.ours)
    else:
        twins.ours.load_state_dict(copy.deepcopy(twins.theirs.state_dict()))
        twins.module.load_state_dict(twins.plain.state_dict())
    twins.ours.param_groups[0]["lr"] = twins.theirs.param_groups[0]["lr"] = 0.01
    steps(twins, 2)


@pytest.mark.long
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


def test_parameters_may_be_rebound_and_changed_between_steps() -> None:
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
    part = next(twins.module.children())
    part.load_state_dict(copy.deepcopy(part.state_dict()), assign=True)
    with pytest.raises(memgraph.FusedError, match="is no longer a parameter of the optimizer"):
        twins.model(batch()).backward()


@pytest.mark.long
def test_evaluation_changes_nothing() -> None:
    twins = fused(kind="momentum", budget=smallest("momentum"))
    steps(twins, 2)
    before = facts(twins.module, twins.ours)
    with torch.no_grad():
        twins.model(batch())
    twins.model(batch())  # and backward does not run
    assert same(facts(twins.module, twins.ours), before)
    assert_kept(twins.model, twins.budget)
    steps(twins, 2)
