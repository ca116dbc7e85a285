"""With `fuse_update`, frozen parameters need no memory but their own, whenever they are frozen."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memgraph
from memgraph.optim.offloaded_update import OffloadedStates, OffloadedUpdate
from memgraph.profile.memory_meter import measure_peak, resident_bytes
from memgraph.tensors.parameter_groups import state_tensors
from tests.support.fused_updates import ROOM, fused, smallest, steps, train
from tests.support.streamed_state import OPTIMIZERS, WIDTH, Twins, batch, chain, far, least, loss

pytestmark = pytest.mark.usefixtures("small_windows")

COUNT = 8  # bytes: the steps that Adagrad counts for what it never trains


class Beside(nn.Module):
    """Layers, and beside them a weight of 16.8 MB that is not trained: as a parameter, as a buffer, or left out."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = chain(2)
        beside = torch.zeros(64 * WIDTH, WIDTH)
        if kind == "parameter":
            self.beside = nn.Parameter(beside, requires_grad=False)
        elif kind == "buffer":
            self.register_buffer("beside", beside)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


@pytest.mark.long
@pytest.mark.parametrize("kind", ["adamw", "adagrad"])
def test_a_frozen_parameter_needs_no_memory(kind: str) -> None:
    frozen, absent, buffer = (
        least(kind, partial(Beside, made), fuse_update=True) for made in ("parameter", "absent", "buffer")
    )
    assert absent <= frozen <= absent + COUNT < buffer


def test_the_optimizer_may_have_it_or_not() -> None:
    found = []
    for owned in (True, False):
        module = Beside("parameter")
        parameters = [parameter for parameter in module.parameters() if owned or parameter.requires_grad]
        given: dict[str, Any] = {"optimizer": OPTIMIZERS["adagrad"](parameters), "loss": loss, "time_limit": 0}
        with pytest.raises(memgraph.BudgetError) as caught:
            memgraph.plan(module, batch(), budget=1, fuse_update=True, **given)
        found.append(caught.value.smallest)
    assert found[1] <= found[0] <= found[1] + COUNT


def freeze(twins: Twins, frozen: bool) -> None:
    for model in (twins.plain, twins.module):
        model[2].requires_grad_(not frozen)  # type: ignore[index]


@pytest.mark.long
def test_what_was_trained_and_is_frozen_fits_where_all_is_trained() -> None:
    """With the states that it has."""
    twins = fused(budget=smallest())
    for frozen in (False, True, False):
        freeze(twins, frozen)
        steps(twins, 1)
    assert far(twins.module, twins.ours)


@pytest.mark.long
@pytest.mark.parametrize("fuse_update", [False, True])
def test_states_that_come_while_others_are_trained_are_counted(fuse_update: bool) -> None:
    twins = Twins(budget=ROOM, fuse_update=fuse_update)
    for frozen in (True, False, True):
        freeze(twins, frozen)
        twins.step(train if fuse_update else None)
    forecast = twins.model.plan.forecast
    assert forecast.by_kind["state"].max() == resident_bytes(state_tensors(twins.ours))
    x = batch()
    twins.ours.zero_grad()
    there = resident_bytes([*twins.module.parameters(), x, *state_tensors(twins.ours)])
    _, allocated = measure_peak(lambda: twins.model(x).backward())
    assert allocated is not None and there + allocated.peak <= forecast.peak


def test_windows_are_those_of_the_step_that_runs() -> None:
    module = Beside("parameter").requires_grad_()
    update = OffloadedUpdate(OPTIMIZERS["adamw"](module.parameters()))
    all_of_it = OffloadedStates(update, window=update.window)
    module.beside.requires_grad_(False)
    layers = OffloadedStates(update, window=update.window)
    assert all_of_it.window != layers.window
    for states in (all_of_it, layers, all_of_it):
        assert not states.is_active
        states.activate()
        assert states.is_active
        (windowed,) = update.windowed
        assert windowed.nbytes == states.window


def change_between(model: Any, optimizer: Any, run: Any, frozen: bool, all_of_it: bool) -> Tensor:
    """A step whose forward does not yet know what is frozen or thawed."""
    module: Any = model._module if isinstance(model, memgraph.CompiledModule) else model
    subject = module if all_of_it else module[2]
    subject.requires_grad_(frozen)
    module[0].requires_grad_()
    made: Tensor = run(model, batch())
    subject.requires_grad_(not frozen)
    made.backward()
    optimizer.step()
    optimizer.zero_grad()
    return made.detach()


@pytest.mark.long
@pytest.mark.parametrize("budget", ["room", "tight"])
@pytest.mark.parametrize("fuse_update", [False, True])
def test_what_is_frozen_or_thawed_before_backward_is_treated_as_in_eager(fuse_update: bool, budget: str) -> None:
    twins = Twins(budget=ROOM if budget == "room" else smallest(fuse_update=fuse_update), fuse_update=fuse_update)
    for frozen, all_of_it in ((True, False), (False, False), (True, True)):
        twins.step(partial(change_between, frozen=frozen, all_of_it=all_of_it))
    freeze(twins, frozen=False)
