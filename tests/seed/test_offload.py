"""A module under a budget does what FairScale's OffloadModel does, or should have done."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memgraph
from memgraph.optim import offloaded_update
from memgraph.storage import io_threads
from tests.support.compare import Fact
from tests.support.seed_modules import WIDTH, Function, assert_alike, batch, linear
from tests.support.streamed_state import WIDTH as WIDE
from tests.support.streamed_state import Twins, chain, far, loss, streamed, tightest
from tests.support.streamed_state import batch as wide_batch


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that an update of little takes several."""
    monkeypatch.setattr(offloaded_update, "SMALLEST", 1 << 16)


def test_an_empty_sequence_is_the_identity() -> None:
    model, x = memgraph.compile(nn.Sequential(), "1MB"), batch().requires_grad_()
    assert torch.equal(model(x), x)
    model(x).square().sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * x)


@pytest.mark.parametrize("shape", [(1, WIDTH), (6, WIDTH), (3, 1, WIDTH), (WIDTH,)], ids=str)
def test_sizes_of_one_stay(shape: tuple[int, ...]) -> None:
    def loop(model: Any) -> list[Fact]:
        x = torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape).requires_grad_()
        out = model(x)
        assert out.shape == (*shape[:-1], 1)
        out.square().sum().backward()
        return [out, x.grad]

    assert_alike(
        loop, lambda: nn.Sequential(linear(WIDTH, 1), nn.Tanh(), linear(1, WIDTH), nn.Tanh(), linear(WIDTH, 1))
    )


@pytest.mark.parametrize("requires_grad", [True, False])
def test_what_the_caller_gives_stays_what_it_was(requires_grad: bool) -> None:
    def loop(model: Any) -> list[Fact]:
        x = batch().requires_grad_(requires_grad)
        version = x._version
        model(x).square().sum().backward()
        assert (x.requires_grad, x.is_leaf, x._version) == (requires_grad, True, version)
        assert torch.equal(x, batch())
        return [x.grad]

    assert_alike(loop, lambda: nn.Sequential(linear(), nn.ReLU(), linear()))


def test_layers_before_and_behind_are_trained() -> None:
    def loop(model: Any) -> list[Fact]:
        before, behind = linear(), linear()
        behind(model(before(batch()).tanh())).square().sum().backward()
        return [before.weight.grad, before.bias.grad, behind.weight.grad]

    assert_alike(loop, lambda: nn.Sequential(linear(), nn.ReLU(), linear()))


def test_statistics_of_a_batch_are_counted_once_a_step() -> None:
    def loop(model: Any) -> list[Fact]:
        for step in range(1, 4):
            model(batch(seed=step)).square().sum().backward()
            assert model[1].num_batches_tracked == step
        return []

    assert_alike(loop, lambda: nn.Sequential(linear(), nn.BatchNorm1d(WIDTH), nn.GELU(), linear()))


class Halves(nn.Module):
    """Takes two tensors and hands on two."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = linear(), linear()

    def forward(self, both: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        left, right = both
        return self.left(right).tanh(), self.right(left).sigmoid()


def test_layers_hand_on_several_tensors() -> None:
    def loop(model: Any) -> list[Fact]:
        x, y = batch().requires_grad_(), batch(seed=2).requires_grad_()
        left, right = model((x, y))
        (left * right).sum().backward()
        return [left, right, x.grad, y.grad]

    assert_alike(loop, lambda: nn.Sequential(Halves(), Halves(), Halves()))


def test_several_inputs_and_keywords_are_one_call() -> None:
    def function(net: Any, x: Tensor, y: Tensor, *, scale: Tensor, shift: float = 0.0) -> Tensor:
        out: Tensor = net.b(net.a(x).tanh() * y) * scale + shift
        return out

    def loop(model: Any) -> list[Fact]:
        given = [batch(seed=seed).requires_grad_() for seed in range(3)]
        one, two = (model(given[0], given[1], scale=given[2], shift=shift) for shift in (0.0, 2.0))
        (one + two).square().sum().backward()
        return [one, two, *(x.grad for x in given)]

    assert_alike(loop, lambda: Function(function))


class Masked(nn.Module):
    """Tokens, a shortcut over everything, a mask that the first and the last layer read, one layer that stands twice, and
    a weight that is used as it is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(512, WIDE)
        self.layers = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(4))
        self.mix = nn.Parameter(torch.randn(WIDE, WIDE) / WIDE**0.5)

    def forward(self, x: Tensor) -> Tensor:
        mask = x > 0
        early = h = self.tokens((x[:, 0].abs() * 100).long() % 512) + x
        for layer in (*self.layers, self.layers[0]):
            h = h + layer(h.masked_fill(mask, 0.1)).tanh()
        h = F.linear(h, self.mix)
        return (h + early).masked_fill(mask, 0.5)


@pytest.mark.long
def test_tokens_shortcuts_masks_and_a_layer_that_stands_twice_stream() -> None:
    twins = Twins(Masked)
    twins.train()
    assert far(twins.module, twins.ours) == {"parameter", "gradient", "state"}


def test_what_was_fetched_and_not_changed_is_not_copied_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that forward reloaded are freed and not copied back."""
    module = chain()
    model = streamed(module, tightest(kind=None, grad=False))
    with torch.no_grad():
        model(wide_batch())
    calls: list[Any] = []
    transfer = io_threads.transfer_pages

    def noted(call: Any, *rest: Any) -> None:
        calls.append(call)
        transfer(call, *rest)

    monkeypatch.setattr(io_threads, "transfer_pages", noted)
    with torch.no_grad():
        model(wide_batch())
    assert far(module) == {"parameter"}
    assert set(calls) == {os.preadv}


@pytest.mark.long
def test_the_profiler_names_what_moves() -> None:
    twins = Twins()
    twins.train(2)
    twins.ours.zero_grad()
    with torch.profiler.profile() as profiler:
        twins.model(wide_batch()).backward()
    names = {event.key for event in profiler.key_averages()}
    assert {f"memgraph::{verb}" for verb in ("reload", "wait", "offload", "free")} <= names


@pytest.mark.long
@pytest.mark.parametrize("first", [tightest, lambda: 10**9], ids=["tight", "roomy"])
def test_what_is_saved_under_one_budget_loads_under_another(first: Any) -> None:
    one = Twins(budget=first())
    for seed in range(2):
        one.step(seed=seed)
    other = Twins(partial(chain), budget=10**9 if first is tightest else tightest())
    assert list(one.model.state_dict()) == list(chain().state_dict()) == list(other.model.state_dict())
    for twin, state, optimizer in ((other.plain, one.plain, one.theirs), (other.model, one.model, one.ours)):
        twin.load_state_dict(state.state_dict())
        (other.theirs if twin is other.plain else other.ours).load_state_dict(optimizer.state_dict())
    for seed in range(2):
        other.step(seed=seed)


@pytest.mark.long
def test_a_layer_larger_than_the_budget_is_named() -> None:
    torch.manual_seed(0)
    wide = nn.Linear(WIDE, 64 * WIDE)
    model = nn.Sequential(nn.Linear(WIDE, WIDE), wide, nn.Linear(64 * WIDE, WIDE))
    budget = wide.weight.nbytes // 2
    with pytest.raises(memgraph.BudgetError, match=r"\(aten\.mm\.default, [12]\)") as caught:
        streamed(model, budget)(wide_batch())
    assert streamed(model, caught.value.smallest)(wide_batch()) == loss(model(wide_batch()))
