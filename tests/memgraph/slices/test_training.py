"""Training in slices beside eager: equal losses, near gradients, and measured <= forecast <= budget.

A loss has eager's bits: all rows are there when it is summed. The gradient of what all rows share, as the weight of the
head, is a sum over rows that is cut: parts are added in another order, so its bits may differ by some units in the last
place of the largest element, and with it those of what is trained with it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memgraph
from memgraph.profile.memory_meter import measure_peak, resident_bytes
from tests.support.compare import same_gradients
from tests.support.sliced_models import (
    Headed,
    Heads,
    Mixers,
    Returning,
    cross_entropy,
    masked,
    smoothed,
    smoothed_by_hand,
    soft_capped,
    tokens,
    z_loss,
)

NEAR = 2e-6  # of the largest element of a gradient
SHARE = 0.5  # of what eager holds above parameters and batch; without slices no plan fits
BATCH, LENGTH = 4, 64  # 256 rows
ROOM = 10**9
Run = Callable[[Any], Any]


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return tokens and labels, some of them ignored; each seed has others."""
    first, second = tokens(BATCH, LENGTH)
    return first.roll(seed), second


def headed(loss: Any = cross_entropy, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return Headed(loss, **options)


def loss_of(result: Any) -> Tensor:
    return result if isinstance(result, Tensor) else result["loss"]


def step(model: Any) -> Tensor:
    torch.manual_seed(1)
    loss = loss_of(model(*batch()))
    loss.backward()
    return loss.detach()


def budget_of(module: nn.Module, share: float = SHARE, run: Run = step) -> int:
    """Return the bytes of parameters and batch, and a share of what eager's step holds above them."""
    eager = copy.deepcopy(module)
    _, allocated = measure_peak(lambda: run(eager))
    assert allocated is not None
    return resident_bytes([*module.parameters(), *module.buffers(), *batch()]) + int(share * allocated.peak)


def assert_near(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is not None and other.grad is not None:
            assert float((one.grad - other.grad).abs().max()) <= NEAR * float(other.grad.abs().max()), name


def assert_kept(model: memgraph.CompiledModule) -> None:
    """Check that the budget was kept, and that the step ran in slices."""
    report = model.plan
    assert report.slices
    assert report.measured is not None and report.measured <= report.peak <= report.budget


def beside_eager(
    module: nn.Module, run: Run = step, budget: int | None = None, **wishes: Any
) -> memgraph.CompiledModule:
    """Run a loop with a module in slices and with the plain one; compare its results, bit by bit, and the gradients."""
    eager = copy.deepcopy(module)
    asked = {"slices": "auto", "offload": None} | wishes
    model = memgraph.compile(module, budget_of(module) if budget is None else budget, **asked)
    ours, theirs = run(model), run(eager)
    assert torch.equal(ours, theirs)
    assert_near(module, eager)
    return model


@pytest.mark.parametrize("loss", [cross_entropy, smoothed, masked, z_loss], ids=lambda loss: loss.__name__)
def test_a_step_that_does_not_fit_runs_in_slices(loss: Any) -> None:
    module = headed(loss)
    with pytest.raises(memgraph.BudgetError):
        memgraph.plan(copy.deepcopy(module), *batch(), budget=budget_of(module), offload=None, time_limit=0.5)
    assert_kept(beside_eager(module))


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


@pytest.mark.parametrize("factor", [0.25, 3.0, 0.0, -1.0])
def test_a_scaled_loss_has_scaled_gradients(factor: float) -> None:
    def scaled(model: Any) -> Tensor:
        loss = model(*batch()) * factor
        loss.backward()
        return loss.detach()

    beside_eager(headed(), scaled)


def test_backward_may_run_twice() -> None:
    """Each backward scales what forward made, the second not what the first has scaled."""

    def twice(model: Any) -> Tensor:
        loss = model(*batch())
        (loss * 3.0).backward(retain_graph=True)
        (loss * 0.25).backward()
        return loss.detach()

    beside_eager(headed(), twice)


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


@pytest.mark.usefixtures("given_up")
@pytest.mark.parametrize("make", [partial(headed, dropout=0.2), Heads], ids=["a head", "two heads"])
def test_slices_beside_recompute_and_offload(make: Any, tmp_path: Any) -> None:
    """No value is kept; those that may be made once, into which parts are written or added, are offloaded."""
    torch.manual_seed(0)
    module = make()
    asked = {"head": 4, "second": 3} if isinstance(module, Heads) else {"head": 4}
    model = beside_eager(module, budget=ROOM, slices=asked, offload="disk", spill_dir=str(tmp_path))
    assert {type(decision).__name__ for decision in model.plan.plan} >= {"Offload", "Recompute"}


@pytest.mark.usefixtures("fate")
def test_slices_with_one_placement_for_all_values() -> None:
    def twice(model: Any) -> Tensor:
        loss = model(*batch())
        (loss * 3.0).backward(retain_graph=True)
        (loss * 0.25).backward()
        return loss.detach()

    beside_eager(headed(dropout=0.2), budget=ROOM, slices={"head": 4})
    beside_eager(headed(), twice, budget=ROOM, slices={"head": 4})


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


def test_a_saved_plan_has_its_slices() -> None:
    module = headed()
    first = memgraph.compile(copy.deepcopy(module), budget_of(module), slices="auto", offload=None)
    step(first)
    text = first.plan.to_json()
    again = beside_eager(module, plan=text, slices=None)
    assert again.plan.slices == first.plan.slices and again.plan.peak == first.plan.peak
    assert_kept(again)


def test_a_saved_plan_of_another_step_is_refused() -> None:
    first = memgraph.compile(headed(), ROOM, slices={"head": 4})
    step(first)
    plan = first.plan.to_json()
    with pytest.raises(memgraph.PlanError, match="the saved plan is for another shape"):
        memgraph.compile(headed(), ROOM, plan=plan)(*tokens(2, 32))
    with pytest.raises(memgraph.PlanError, match="the saved plan is for another model"):
        memgraph.compile(headed(bias=True), ROOM, plan=plan)(*batch())


def test_plans_with_and_without_slices_may_be_given_together() -> None:
    module = headed()
    trained, seen = (memgraph.compile(copy.deepcopy(module), ROOM, slices=asked) for asked in ({"head": 4}, None))
    step(trained)
    with torch.no_grad():
        expected = seen(*batch())
    model = memgraph.compile(module, ROOM, plan=[trained.plan.to_json(), seen.plan.to_json()])
    with torch.no_grad():
        assert torch.equal(model(*batch()), expected) and not model.plan.slices
    assert torch.equal(step(model), step(trained)) and model.plan.slices


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


class Normed(nn.Module):
    """Batch norm, which mixes rows and changes buffers, between wide layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(8, 128), nn.BatchNorm1d(128)
        self.down, self.drop, self.head = nn.Linear(128, 8), nn.Dropout(0.2), nn.Linear(8, 96)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.drop(self.down(self.norm(self.up(x)).relu()))
        return torch.nn.functional.cross_entropy(self.head(x), labels)


@pytest.mark.parametrize("slices", ["auto", {"head": 3}, {"up": 2}, {"norm": 2}, {"down": 4}], ids=str)
def test_a_batch_norm_is_not_cut(slices: Any) -> None:
    torch.manual_seed(0)
    module = Normed()
    x, labels = torch.randn(128, 8), torch.randint(96, (128,))

    def run(model: Any) -> Tensor:
        torch.manual_seed(1)
        losses = []
        for _ in range(2):
            losses.append(model(x, labels))
            losses[-1].backward()
        return torch.stack([*losses, *(b.double().sum() for b in model.buffers())]).detach()

    try:
        model = beside_eager(module, run, budget=ROOM, slices=slices)
    except ValueError as error:
        assert "which has no ops left that can run in parts" in str(error)
    else:
        ops = {op.name: op for op in model.plan.forecast.trace.ops}
        assert not any("batch_norm" in ops[name].fn for cut in model.plan.slices for name in cut.rule if name in ops)


def test_a_loss_that_forward_uses_twice() -> None:
    """The loss and its square: what scales the gradients is no tangent of 1."""

    class Squared(Headed):
        def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
            loss = super().forward(tokens, labels)
            return loss + 0.5 * loss.square()

    torch.manual_seed(0)
    beside_eager(Squared(cross_entropy), budget=ROOM, slices={"head": 4})


class Decayed(torch.autograd.Function):
    """The identity, whose gradient has a part that does not depend on the tangent."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] + 0.1 * x


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_a_gradient_that_is_not_proportional_to_the_tangent(factor: float) -> None:
    class Own(Headed):
        def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
            return self.loss(Decayed.apply(self.head(self.norm(self.embedding(tokens)))), labels)  # type: ignore

    def scaled(model: Any) -> Tensor:
        loss = factor * model(*batch())
        loss.backward()
        return loss.detach()

    torch.manual_seed(0)
    beside_eager(Own(cross_entropy), scaled, budget=ROOM, slices={"head": 4})


def test_a_step_that_fits_or_has_no_chain_is_as_it_was() -> None:
    module = headed()
    assert not beside_eager(module, budget=ROOM).plan.slices
    x = torch.randn(5, 8)
    small = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    twin = copy.deepcopy(small)
    model = memgraph.compile(small, 20_000, slices="auto")
    for each in (model, twin):
        each(x).square().mean().backward()
    assert same_gradients(small, twin) and not model.plan.slices


@pytest.mark.parametrize(
    "slices", ["yes", 3, True, {"head": 1}, {"head": True}, {"head": 2.0}, {3: 2}, ["head"]], ids=str
)
def test_wrong_arguments_are_refused(slices: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"slices.*lm_head"):
        memgraph.compile(headed(), ROOM, slices=slices)


@pytest.mark.parametrize(
    "slices, why",
    [
        ({"nothing": 2}, "slices has 'nothing', which is no submodule"),
        ({"drop": 2}, "slices has 'drop', which has no ops left that can run in parts"),
        ({"norm": 2}, "slices has 'norm', which has no ops left that can run in parts"),
    ],
)
def test_a_submodule_that_has_no_chain_is_named(slices: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        step(memgraph.compile(headed(), ROOM, slices=slices))


def mixed(model: Any) -> Tensor:
    loss = model(torch.randn(2, 64, 8, generator=torch.Generator().manual_seed(1)))
    loss.backward()
    return loss.detach()


def test_a_submodule_is_cut_in_what_those_before_it_left_whole() -> None:
    """The chain of the first layer reaches through all layers but for a sum, which the second one still has."""
    torch.manual_seed(0)
    first, second = beside_eager(Mixers(), mixed, budget=ROOM, slices={"up.0": 2, "down.0": 3}).plan.slices
    assert (first.parts, second.parts) == (2, 3) and first.rule.keys().isdisjoint(second.rule)


@pytest.mark.parametrize("slices", [{"up.0": 2, "up": 2}, {"up": 2, "up.0": 2}], ids=str)
def test_a_submodule_of_which_nothing_is_left_whole_is_named(slices: Any) -> None:
    torch.manual_seed(0)
    why = f"slices has {list(slices)[1]!r}, which has no ops left that can run in parts; leave it out, or give"
    with pytest.raises(ValueError, match=why):
        mixed(memgraph.compile(Mixers(), ROOM, slices=slices))
