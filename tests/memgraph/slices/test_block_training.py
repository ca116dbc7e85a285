"""Training with weights in blocks of rows: eager's bits, under budgets that whole weights do not fit."""

from __future__ import annotations

import copy
import re
from functools import cache, partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memgraph
from memgraph.planning.attempts import attempts
from memgraph.slices.step_cuts import ATTEMPTS, WHOLE
from tests.support.block_models import WORDS, Words, head_in_blocks, words
from tests.support.smallest_budget import smallest_of
from tests.support.streamed_state import SLACK, TINY, facts, far, same

pytestmark = pytest.mark.usefixtures("small_windows")
STEPS = 3
Make = Any


@cache
def least(make: Make = Words, blocks: bool = True, **options: Any) -> int:
    """Return about the smallest budget, with weights in blocks or without."""
    model = make()
    adam = torch.optim.Adam(model.parameters())
    wishes: dict[str, Any] = {"budget": TINY, "optimizer": adam, "time_limit": 0, **options}
    with mock.patch.object(attempts, "ATTEMPTS", ATTEMPTS if blocks else (WHOLE,)):
        return int(smallest_of(lambda: memgraph.plan(model, *words(), **wishes)) * SLACK)


class Pair:
    """A model in eager, and the same model in blocks."""

    def __init__(self, make: Make = Words, budget: int = 0, optimizer: Any = torch.optim.Adam, **options: Any) -> None:
        self.budget = budget or least(make)
        self.plain = make()
        self.module = copy.deepcopy(self.plain)
        self.theirs, self.ours = (optimizer(model.parameters(), lr=1e-2) for model in (self.plain, self.module))
        self.model = memgraph.compile(self.module, self.budget, optimizer=self.ours, time_limit=0, **options)

    def step(self, do: Any, seed: int = 0) -> None:
        """Let both do the same, and compare all that is left."""
        theirs = do(self.plain, self.theirs, *words(seed))
        ours = do(self.model, self.ours, *words(seed))
        assert same([ours], [theirs])
        assert same(facts(self.module, self.ours), facts(self.plain, self.theirs))
        report = self.model.plan
        assert report.measured is None or report.measured <= report.peak <= self.budget

    def train(self, do: Any = None, steps: int = STEPS) -> None:
        for seed in range(steps):
            self.step(do or train, seed)
        assert self.model.plan.row_blocks and self.model.plan.measured is not None
        assert far(self.module, self.ours)


def train(model: nn.Module, optimizer: Any, *batch: Tensor, clear: Any = None) -> Tensor:
    (clear or optimizer.zero_grad)()
    loss: Tensor = model(*batch)
    loss.backward()
    optimizer.step()
    return loss.detach()


@pytest.mark.long
@head_in_blocks
def test_blocks_make_smaller_budgets_work() -> None:
    weight = WORDS * 1024
    assert least() < 0.6 * least(blocks=False)
    assert least(blocks=False) > weight > 0.9 * least()


@pytest.mark.long
@head_in_blocks
def test_training_equals_eager() -> None:
    pair = Pair()
    pair.train()
    rows = {row.weight: row for row in pair.model.plan.row_blocks}
    assert set(rows) == {"token.weight", "head.weight"}
    assert all(row.blocks == -(-WORDS // row.rows) > 1 and not row.rounds for row in rows.values())


@pytest.mark.long
@head_in_blocks
@pytest.mark.parametrize("options", [{"bias": False}, {"padding": 3}], ids=str)
def test_so_do_others(options: dict[str, Any]) -> None:
    Pair(partial(Words, **options), least()).train()


@pytest.mark.long
@head_in_blocks
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_any_optimizer_in_windows_does(kind: Any) -> None:
    Pair(optimizer=kind).train()


@pytest.mark.long
@head_in_blocks
def test_a_frozen_weight_comes_in_blocks() -> None:
    def make() -> Words:
        model = Words()
        model.head.weight.requires_grad_(False)
        return model

    pair = Pair(make, least())
    pair.train()
    assert pair.module.head.weight.grad is None


@pytest.mark.long
def test_a_hook_keeps_its_gradient_whole() -> None:
    seen: list[Tensor] = []
    pair = Pair(budget=least(blocks=False))
    for model in (pair.plain, pair.module):
        model.head.weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    pair.step(train)
    assert len(seen) == 2 and torch.equal(seen[0], seen[1])


@pytest.mark.long
@head_in_blocks
def test_a_tied_weight_comes_in_blocks() -> None:
    make = partial(Words, tied=True)
    assert least(make) < 0.6 * least(make, blocks=False)
    pair = Pair(make, least(make))
    pair.train()
    assert [row.weight for row in pair.model.plan.row_blocks] == ["token.weight"]


def parts_in_turn(count: int) -> Any:
    """Return a step of eager's that is that of micro-batches: their gradients add up."""

    def step(model: nn.Module, optimizer: Any, *batch: Tensor) -> Tensor:
        if isinstance(model, memgraph.CompiledModule):
            return train(model, optimizer, *batch)
        optimizer.zero_grad()
        losses = []
        for now, then in zip(*(x.tensor_split(count) for x in batch), strict=True):
            losses.append(model(now, then) * (len(now) / len(batch[0])))
            losses[-1].backward()
        optimizer.step()
        return sum(losses[1:], losses[0]).detach()

    return step


@pytest.mark.long
@head_in_blocks
@pytest.mark.parametrize(("count", "tied"), [(2, False), (3, True)])
def test_micro_batches_read_blocks(count: int, tied: bool) -> None:
    make, options = partial(Words, tied=tied), {"microbatches": count, "reduction": "mean"}
    budget = WORDS * 1024  # as many bytes as a weight has, which whole weights need more than twice of
    assert least(make, blocks=False, **options) > 2 * budget
    Pair(make, budget, **options).train(parts_in_turn(count))


@pytest.mark.long
@head_in_blocks
def test_gradients_of_micro_batches_accumulate() -> None:
    def accumulated(model: nn.Module, optimizer: Any, *batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        for part in range(2):
            before = [p.grad for p in model.parameters()]
            batches = [x.roll(part) for x in batch]
            if isinstance(model, memgraph.CompiledModule):
                model(*batches).backward()
                continue
            model.zero_grad()
            for now, then in zip(*(x.tensor_split(2) for x in batches), strict=True):
                (model(now, then) * 0.5).backward()
            for p, grad in zip(model.parameters(), before, strict=True):  # micro-batches are added up first
                p.grad = p.grad if grad is None or p.grad is None else grad + p.grad
        optimizer.step()
        return torch.zeros(())

    options: dict[str, Any] = {"microbatches": 2, "reduction": "mean", "accumulate": True}
    Pair(budget=WORDS * 1024, **options).train(accumulated)


@pytest.mark.long
@head_in_blocks
def test_blocks_of_two_open_forwards() -> None:
    def twice(model: nn.Module, optimizer: Any, *batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(*batch) + model(*(x.roll(1) for x in batch))
        loss.backward()
        optimizer.step()
        return loss.detach()

    budget = least(forwards=2, accumulate=False)
    assert budget < least(blocks=False, forwards=2, accumulate=False)
    Pair(budget=budget, forwards=2, accumulate=False).train(twice)


class WithLogits(Words):
    def forward(self, now: Tensor, then: Tensor) -> Any:
        logits = self.head(F.gelu(self.layer(self.token(now))))
        return F.cross_entropy(logits, then), logits


@pytest.mark.long
@head_in_blocks
def test_a_loss_may_come_with_logits() -> None:
    def first(model: nn.Module, optimizer: Any, *batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss, _ = model(*batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def of_logits(model: nn.Module, optimizer: Any, *batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        _, logits = model(*batch)
        logits.square().mean().backward()
        return logits.detach()

    pair = Pair(WithLogits, least(WithLogits))
    pair.train(first)
    theirs, ours = (of_logits(*each, *words(9)) for each in ((pair.plain, pair.theirs), (pair.model, pair.ours)))
    assert torch.equal(theirs, ours)
    assert same(facts(pair.module), facts(pair.plain))


@pytest.mark.long
def test_a_weight_that_a_lookup_changes_is_left_whole() -> None:
    def make() -> Words:
        model = Words()
        model.token.max_norm = 1.0
        return model

    assert least(make) > WORDS * 1024
    Pair(make, least(make)).step(train)


@pytest.mark.long
def test_where_whole_weights_fit_they_are_whole() -> None:
    pair = Pair(budget=least(blocks=False))
    pair.step(train)
    assert not pair.model.plan.row_blocks


@pytest.mark.long
@head_in_blocks
def test_gradients_accumulate() -> None:
    def accumulated(model: nn.Module, optimizer: Any, *batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = torch.empty(())
        for part in range(3):
            loss = model(*(x.roll(part) for x in batch))
            loss.backward()
        optimizer.step()
        return loss.detach()

    Pair(budget=least(accumulate=True)).train(accumulated)


@pytest.mark.long
@head_in_blocks
def test_gradients_set_to_zero_are_added_to() -> None:
    pair = Pair(budget=least(accumulate=True))
    for seed in range(STEPS):
        pair.step(lambda model, adam, *batch: train(model, adam, *batch, clear=partial(adam.zero_grad, False)), seed)
    assert pair.model.plan.row_blocks


@pytest.mark.long
@head_in_blocks
def test_a_kept_gradient_is_not_overwritten() -> None:
    kept: list[Tensor] = []

    def keeping(model: nn.Module, optimizer: Any, *batch: Tensor) -> Tensor:
        loss = train(model, optimizer, *batch)
        kept.append(model.get_parameter("head.weight").grad)  # type: ignore[arg-type]
        return loss

    pair = Pair()
    pair.train(keeping, 2)
    assert torch.equal(kept[0], kept[1]) and torch.equal(kept[2], kept[3]) and not torch.equal(kept[0], kept[2])


@pytest.mark.long
@head_in_blocks
def test_gradients_can_be_asked_for() -> None:
    pair = Pair()
    pair.train()
    weights = [dict(model.named_parameters())["head.weight"] for model in (pair.plain, pair.module)]
    for model in (pair.plain, pair.model):
        model.zero_grad()
    ours, theirs = (
        torch.autograd.grad(model(*words()), w)[0] for model, w in zip((pair.plain, pair.model), weights, strict=True)
    )
    assert torch.equal(ours, theirs)


@pytest.mark.long
@head_in_blocks
def test_gradients_of_two_forwards_are_warned_of() -> None:
    pair = Pair()
    pair.train()
    for model in (pair.plain, pair.module):
        model.zero_grad()
    with pytest.warns(RuntimeWarning, match="2 forwards are open at once, and may take") as warned:
        (pair.model(*words(1)) + pair.model(*words(2))).backward()
    (pair.plain(*words(1)) + pair.plain(*words(2))).backward()
    assert same(facts(pair.module), facts(pair.plain))
    together = max(int(n) for each in warned for n in re.findall(r"may take (\d+) bytes together", str(each.message)))
    assert together > 2 * WORDS * 1024  # both large gradients, whole


@pytest.mark.long
@head_in_blocks
def test_evaluation_equals_eager() -> None:
    pair = Pair()
    pair.train(steps=2)
    with torch.no_grad():
        assert torch.equal(pair.model(*words(5)), pair.plain(*words(5)))
    pair.train(steps=1)


@pytest.mark.long
@head_in_blocks
def test_clipping_and_saving(tmp_path: Any) -> None:
    def clipped(model: nn.Module, optimizer: Any, *batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(*batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
        optimizer.step()
        return loss.detach()

    pair = Pair()
    pair.train(clipped, 2)
    memgraph.save_state(tmp_path / "run.pt", pair.model, pair.ours)
    other = Pair(plan=pair.model.plan.to_json())
    memgraph.load_state(tmp_path / "run.pt", other.model, other.ours)
    other.plain.load_state_dict(pair.plain.state_dict())
    other.theirs.load_state_dict(pair.theirs.state_dict())
    other.train(clipped)
    assert other.model.plan.row_blocks == pair.model.plan.row_blocks


@pytest.mark.long
def test_a_saved_plan_of_another_model_is_refused() -> None:
    pair = Pair()
    pair.step(train)
    text = pair.model.plan.to_json()
    with pytest.raises(memgraph.PlanError, match="another"):
        Pair(partial(Words, bias=False), least(), plan=text).step(train)


@pytest.mark.long
def test_an_index_out_of_range_is_refused() -> None:
    pair = Pair()
    pair.step(train)
    with pytest.raises(IndexError, match="out of range"):
        pair.model(torch.full((8,), WORDS), words()[1])


@pytest.mark.long
def test_backward_may_run_twice() -> None:
    pair = Pair()
    pair.step(train)
    loss = pair.model(*words())
    loss.backward(retain_graph=True)
    loss.backward()
    expected = pair.plain(*words())
    expected.backward(retain_graph=True)
    expected.backward()
    assert same(facts(pair.module), facts(pair.plain))
