"""Training in slices beside eager: equal losses, near gradients, and measured <= forecast <= budget.

A loss has eager's bits: all rows are there when it is summed. The gradient of what all rows share, as the weight of the
head, is a sum over rows that is cut: parts are added in another order, so its bits may differ by some units in the last
place of the largest element, and with it those of what is trained with it.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import memgraph
from memgraph.profile.memory_meter import resident_bytes
from tests.support.sliced_models import (
    Heads,
    Returning,
    cross_entropy,
    masked,
    smoothed,
    smoothed_by_hand,
    soft_capped,
    z_loss,
)
from tests.support.sliced_training import (
    NEAR,
    ROOM,
    assert_kept,
    assert_near,
    backward_twice,
    batch,
    beside_eager,
    budget_of,
    headed,
    step,
)  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("loss", [cross_entropy, smoothed, masked, z_loss], ids=lambda loss: loss.__name__)
def test_a_step_that_does_not_fit_runs_in_slices(loss: Any) -> None:
    module = headed(loss)
    with pytest.raises(memgraph.BudgetError):
        memgraph.plan(copy.deepcopy(module), *batch(), budget=budget_of(module), offload=None, time_limit=0.5)
    assert_kept(beside_eager(module))


@pytest.mark.long
@pytest.mark.parametrize("options", [{"tied": True}, {"bias": True}, {"dropout": 0.3}], ids=["tied", "bias", "dropout"])
def test_so_do_others(options: dict[str, Any]) -> None:
    assert_kept(beside_eager(headed(**options)))


@pytest.mark.parametrize("loss", [soft_capped, smoothed_by_hand], ids=lambda loss: loss.__name__)
def test_a_loss_of_its_own_ops_is_near(loss: Any) -> None:
    """tanh and exp of a part may take another kernel for its last elements."""
    first, second = batch()
    given = first, second.clamp(min=0)
    module = headed(loss)
    eager = copy.deepcopy(module)
    budget = budget_of(module, run=lambda model: model(*given).backward())
    model = memgraph.compile(module, budget, slices="auto", offload=None)
    ours, theirs = model(*given), eager(*given)
    ours.backward()
    theirs.backward()
    torch.testing.assert_close(ours, theirs, rtol=NEAR, atol=0.0)
    assert_near(module, eager)
    assert_kept(model)


@pytest.mark.parametrize("parts", [2, 5])
def test_a_submodule_runs_in_as_many_parts_as_are_given(parts: int) -> None:
    model = beside_eager(headed(), slices={"head": parts}, budget=ROOM)
    (cut,) = model.plan.slices
    assert (cut.parts, len(cut.part_rows), cut.rows) == (parts, parts, 256)
    assert len(cut.rules) > 5  # the loss and the gradients too
    assert_kept(model)


@pytest.mark.long
def test_each_of_two_heads_runs_in_parts() -> None:
    torch.manual_seed(0)
    model = beside_eager(Heads(), slices={"head": 4, "second": 2}, budget=ROOM)
    assert [cut.parts for cut in model.plan.slices] == [4, 2]
    torch.manual_seed(0)
    assert len(beside_eager(Heads(), budget=budget_of(Heads(), 0.45)).plan.slices) == 2


def test_logits_that_are_returned_are_there() -> None:
    torch.manual_seed(0)
    module = Returning(cross_entropy)
    eager = copy.deepcopy(module)
    model = memgraph.compile(module, ROOM, slices={"head": 3})
    ours, theirs = model(*batch()), eager(*batch())
    assert torch.equal(ours["logits"], theirs["logits"]) and torch.equal(ours["loss"], theirs["loss"])
    ours["loss"].backward()
    theirs["loss"].backward()
    assert_near(module, eager)
    assert_kept(model)


@pytest.mark.long
@pytest.mark.parametrize("factor", [0.25, 3.0, 0.0, -1.0])
def test_a_scaled_loss_has_scaled_gradients(factor: float) -> None:
    def scaled(model: Any) -> Tensor:
        loss = model(*batch()) * factor
        loss.backward()
        return loss.detach()

    beside_eager(headed(), scaled)


def test_backward_may_run_twice() -> None:
    """Each backward scales what forward made, the second not what the first has scaled."""
    beside_eager(headed(), backward_twice)


def test_gradients_add_up_over_calls() -> None:
    def adding(model: Any) -> Tensor:
        losses = [model(*batch(seed)) for seed in range(2)]
        for factor, loss in zip((1.0, 0.5), losses, strict=True):
            (loss * factor).backward()
        return torch.stack(losses).detach()

    def one_by_one(model: Any) -> Tensor:
        losses = []
        for seed in range(3):
            losses.append(model(*batch(seed)))
            losses[-1].backward()
        return torch.stack(losses).detach()

    beside_eager(headed(), one_by_one, budget=budget_of(headed(), 0.7))
    beside_eager(headed(), adding, budget=ROOM, slices={"head": 4}, forwards=2)


def test_another_loss_may_be_in_the_same_backward() -> None:
    def both(model: Any) -> Tensor:
        weight = next(p for name, p in model.named_parameters() if name.endswith("head.weight"))
        loss = 2.0 * model(*batch()) + 0.1 * weight.square().sum()
        loss.backward()
        return loss.detach()

    beside_eager(headed(), both)


def test_an_evaluation_beside_gradients_runs_in_slices_if_it_does_not_fit_otherwise() -> None:
    module, given = headed(), batch()
    whole = memgraph.plan(copy.deepcopy(module).requires_grad_(False), *given, budget=ROOM)
    model = memgraph.compile(module, whole.peak, slices="auto", offload=None)
    with torch.no_grad():
        expected = model(*given)
    assert not model.plan.slices
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with torch.no_grad():
        assert torch.equal(model(*given), expected)
    assert model.plan.slices and model.plan.peak <= whole.peak


def test_eval_and_no_grad_run_in_slices_too() -> None:
    module = headed(dropout=0.5)
    eager = copy.deepcopy(module).eval()
    model = memgraph.compile(module, ROOM, slices={"head": 4})
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(*batch()), eager(*batch()))
    assert model.plan.slices
    assert torch.equal(step(model), step(eager))
    assert_near(module, eager)


def train(model: Any, optimizer: torch.optim.Optimizer, count: int = 3) -> list[Tensor]:
    losses = []
    for seed in range(count):
        loss = model(*batch(seed))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("fuse_update", [False, True], ids=["afterwards", "in backward"])
def test_an_optimizer_of_the_step(fuse_update: bool) -> None:
    """An update of AdamW divides by the gradient's size: near zero, the last bits of a sum decide its sign."""
    module = headed()
    eager = copy.deepcopy(module)
    states = 2 * resident_bytes(module.parameters())
    ours = torch.optim.AdamW(module.parameters(), lr=1e-3, eps=1e-3)
    model = memgraph.compile(
        module, budget_of(module) + states, slices="auto", offload=None, optimizer=ours, fuse_update=fuse_update
    )
    found = train(model, ours)
    expected = train(eager, torch.optim.AdamW(eager.parameters(), lr=1e-3, eps=1e-3))
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found, expected, rtol=NEAR, atol=0.0)
    for one, other in zip(module.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert_kept(model)


@pytest.mark.long
@pytest.mark.usefixtures("given_up")
@pytest.mark.parametrize("make", [partial(headed, dropout=0.2), Heads], ids=["a head", "two heads"])
def test_slices_beside_recompute_and_offload(make: Any, tmp_path: Any) -> None:
    """No value is kept; those that may be made once, into which parts are written or added, are offloaded."""
    torch.manual_seed(0)
    module = make()
    asked = {"head": 4, "second": 3} if isinstance(module, Heads) else {"head": 4}
    model = beside_eager(module, budget=ROOM, slices=asked, offload="disk", spill_dir=str(tmp_path))
    assert {type(decision).__name__ for decision in model.plan.plan} >= {"Offload", "Recompute"}


@pytest.mark.long
@pytest.mark.usefixtures("fate")
def test_slices_with_one_placement_for_all_values() -> None:
    beside_eager(headed(dropout=0.2), budget=ROOM, slices={"head": 4})
    beside_eager(headed(), backward_twice, budget=ROOM, slices={"head": 4})


def test_autocast_in_slices() -> None:
    """Sums over rows are in bfloat16, whose parts are each rounded: by 2**-8, as eager's whole sum is."""
    module = headed()
    eager = copy.deepcopy(module)
    model = memgraph.compile(module, ROOM, slices={"head": 4})
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = model(*batch()), eager(*batch())
    assert torch.equal(ours, theirs) and model.plan.slices
    ours.backward()
    theirs.backward()
    for one, other in zip(module.parameters(), eager.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        assert float((one.grad - other.grad).abs().max()) <= 4 * 2**-8 * float(other.grad.abs().max())


@pytest.mark.long
def test_micro_batches_in_slices() -> None:
    module = headed()
    eager = copy.deepcopy(module)
    model = memgraph.compile(module, ROOM, slices={"head": 4}, microbatches=2, reduction="mean")
    first, second = batch()
    given = first, second.clamp(min=0)
    ours, theirs = model(*given), eager(*given)
    ours.backward()
    theirs.backward()
    torch.testing.assert_close(ours, theirs, rtol=NEAR, atol=0.0)
    assert_near(module, eager)


@pytest.mark.long
def test_a_submodule_is_cut_in_each_micro_batch() -> None:
    """Two parts of each, as "auto" makes under a budget: the same slices, and the same peak."""
    module = headed().double()
    eager, twin = copy.deepcopy(module), copy.deepcopy(module)
    options: dict[str, Any] = {"microbatches": 2, "reduction": "mean", "offload": None}
    asked = memgraph.compile(module, ROOM, slices={"head": 2}, **options)
    chosen = memgraph.compile(twin, budget_of(eager), slices="auto", **options)
    first, second = batch()
    losses = [model(first, second.clamp(min=0)) for model in (eager, asked, chosen)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-14, atol=0.0)
    for one, other in zip(module.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-15)
    assert [cut.parts for cut in asked.plan.slices] == [2, 2]
    assert asked.plan.slices == chosen.plan.slices and asked.plan.peak == chosen.plan.peak
    assert_kept(asked)
