"""A step in micro-batches is a loop over the parts of the batch, bit for bit, and the whole batch but for rounding."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memgraph
from passes import Reload, Stream

WORDS, WIDTH, LENGTH = 50, 16, 6
Loss = Callable[[Tensor, Tensor], Tensor]


class Language(nn.Module):
    """Layers with skips around them; the head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True) for _ in range(1)
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        for layer in self.layers:
            h = h + layer(h)
        return h @ self.embedding.weight.t()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.lstm(self.embedding(x))[0])
        return out


def mean(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), target.flatten())


def total(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), target.flatten(), reduction="sum")


def words(rows: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, target = torch.randint(0, WORDS, (2, rows, LENGTH), generator=generator)
    return x, target


def in_a_loop(model: nn.Module, loss: Loss, count: int, x: Tensor, target: Tensor, weighted: bool) -> Tensor:
    """The loss, after a backward for each part."""
    found = torch.zeros(())
    parts = min(count, len(x))
    for rows, its in zip(x.tensor_split(parts), target.tensor_split(parts), strict=True):
        one = loss(model(rows), its)
        one = one * (len(rows) / len(x)) if weighted and parts > 1 else one
        one.backward()
        found = found + one.detach()
    return found


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def assert_equal(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs) > 0
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.long
@pytest.mark.parametrize("make", [Language, Recurrent])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(("rows", "count"), [(6, 3), (7, 3), (2, 5), (1, 4)])
def test_a_loss_in_parts_is_a_loop_over_them(
    make: Callable[[], nn.Module], reduction: str, rows: int, count: int
) -> None:
    loss = {"mean": mean, "sum": total}[reduction]
    plain, whole, module = make(), make(), make()
    model = memgraph.compile(module, "1GB", loss=loss, microbatches=count, reduction=reduction)
    x, target = words(rows)
    ours = model(x, target=target)
    ours.backward()
    assert torch.equal(ours, in_a_loop(plain, loss, count, x, target, reduction == "mean"))
    assert_equal(gradients(module), gradients(plain))
    loss(whole(x), target).backward()
    for a, b in zip(gradients(module), gradients(whole), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert model.plan.measured is not None and model.plan.measured <= model.plan.peak


@pytest.mark.long
def test_a_loss_outside_sees_the_whole_batch() -> None:
    plain, module = Language(), Language()
    model = memgraph.compile(module, "1GB", microbatches=3)
    x, target = words(7)
    target[:3] = -100  # a mean over the other rows, which no weights by rows would give
    mean(model(x), target).backward()
    parts = [copy.deepcopy(plain) for _ in range(3)]
    outputs = torch.cat([part(rows) for part, rows in zip(parts, x.tensor_split(3), strict=True)])
    mean(outputs, target).backward()
    sums = [p[0] + p[1] + p[2] for p in zip(*map(gradients, parts), strict=True)]
    assert_equal(gradients(module), sums)
    mean(plain(x), target).backward()
    for a, b in zip(gradients(module), gradients(plain), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.long
def test_gradients_are_added_to_those_that_are_there() -> None:
    plain, module = Language(), Language()
    model = memgraph.compile(module, "1GB", loss=mean, microbatches=2, reduction="mean")
    sums: list[Tensor] = []
    for seed in range(3):
        x, target = words(5, seed)
        model(x, target=target).backward()
        plain.zero_grad()
        in_a_loop(plain, mean, 2, x, target, weighted=True)
        sums = [a + b for a, b in zip(sums, gradients(plain), strict=True)] if sums else gradients(plain)
        sums = [total.clone() for total in sums]
        assert_equal(gradients(module), sums)


class Wide(nn.Module):
    """A model with more activations than parameters."""

    def __init__(self, width: int = 64, layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x


def square(out: Tensor) -> Tensor:
    return out.square().mean()


def smallest(model: nn.Module, x: Tensor, **wishes: Any) -> int:
    """The smallest budget of a model."""
    try:
        memgraph.plan(model, x, budget=1000, loss=square, time_limit=0, reduction="mean", **wishes)
    except memgraph.BudgetError as error:
        return error.smallest
    raise AssertionError("a budget that is enough for nothing is enough")


@pytest.mark.long
def test_more_parts_need_less_and_what_they_need_is_enough() -> None:
    needed = [smallest(Wide(), torch.ones(1024, 64), offload=None, microbatches=count) for count in (1, 2, 4)]
    assert needed == sorted(needed, reverse=True)
    assert needed[2] < 0.7 * needed[0]
    plain, module, x = Wide(), Wide(), torch.randn(1024, 64)
    budget = int(1.1 * needed[2])
    model = memgraph.compile(module, budget, loss=square, time_limit=0, offload=None, microbatches=4, reduction="mean")
    model(x).backward()
    for rows in x.tensor_split(4):
        (square(plain(rows)) * (len(rows) / len(x))).backward()
    assert_equal(gradients(module), gradients(plain))
    assert model.plan.measured is not None
    assert model.plan.measured <= model.plan.peak <= budget


@pytest.mark.long
def test_parameters_on_disk_come_once_a_section_and_phase() -> None:
    torch.manual_seed(0)
    module, x = Wide(256, 8), torch.randn(6, 256)
    plain = copy.deepcopy(module)
    budget = int(1.05 * smallest(module, x, microbatches=3))
    assert budget < 2 * sum(parameter.nbytes for parameter in module.parameters())  # with the gradients
    model = memgraph.compile(module, budget, loss=square, time_limit=0, microbatches=3, reduction="mean")
    model(x).backward()
    for rows in x.tensor_split(3):
        (square(plain(rows)) * (len(rows) / len(x))).backward()
    assert_equal(gradients(module), gradients(plain))
    report = model.plan
    assert report.measured is not None and report.measured <= report.peak <= budget
    streamed = [decision.value for decision in report.plan if isinstance(decision, Stream)]
    fetched = [decision.value for decision in report.plan if isinstance(decision, Reload)]
    assert streamed
    assert all(fetched.count(value) <= 2 for value in streamed)


@pytest.mark.long
def test_a_saved_plan_keeps_the_order_of_its_sections() -> None:
    torch.manual_seed(0)
    module, x = Wide(256, 8), torch.randn(6, 256)
    budget = int(1.05 * smallest(module, x, microbatches=3))
    wishes: dict[str, Any] = {"loss": square, "microbatches": 3, "reduction": "mean"}
    first = memgraph.plan(module, x, budget=budget, time_limit=0, **wishes)
    assert any(op.section for op in first.forecast.trace.ops)
    model = memgraph.compile(module, budget, plan=first.to_json(), **wishes)
    model(x).backward()
    assert model.plan.plan == first.plan
    assert [op.name for op in model.plan.forecast.trace.ops] == [op.name for op in first.forecast.trace.ops]
    assert model.plan.measured is not None
    assert model.plan.measured <= model.plan.peak <= budget


@pytest.mark.long
def test_training_with_all_state_on_disk_is_the_plain_loop() -> None:
    torch.manual_seed(0)
    module = Wide(256, 6)
    plain = copy.deepcopy(module)
    ours, theirs = (torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (module, plain))
    budget = int(1.05 * smallest(module, torch.randn(7, 256), microbatches=3, optimizer=ours))
    assert budget < 4 * sum(parameter.nbytes for parameter in module.parameters())
    wishes: dict[str, Any] = {"loss": square, "microbatches": 3, "reduction": "mean", "time_limit": 0}
    model = memgraph.compile(module, budget, optimizer=ours, **wishes)
    for seed in range(3):
        x = torch.randn(7, 256, generator=torch.Generator().manual_seed(seed))
        ours.zero_grad()
        theirs.zero_grad()
        model(x).backward()
        for rows in x.tensor_split(3):
            (square(plain(rows)) * (len(rows) / len(x))).backward()
        assert_equal(gradients(module), gradients(plain))
        ours.step()
        theirs.step()
        assert_equal([*module.parameters()], [*plain.parameters()])
        assert model.plan.measured is not None and model.plan.measured <= model.plan.peak <= budget
    assert {decision.value for decision in model.plan.plan if isinstance(decision, Stream)}


class RowLosses(nn.Module):
    """A recurrent layer of a kind, and a loss for each row."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.embedding, self.layer, self.head = nn.Embedding(16, 8), kind(8, 8, 2, batch_first=True), nn.Linear(8, 4)

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.head(self.layer(self.embedding(ids))[0]).square().mean((1, 2))
        return y


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_recurrent_layers_run_in_micro_batches(kind: Any) -> None:
    torch.manual_seed(0)
    model, ids = RowLosses(kind), torch.randint(0, 16, (6, 5))
    plain = copy.deepcopy(model)
    compiled = memgraph.compile(model, "1GB", microbatches=3)
    for each in (compiled, plain):
        each(ids).sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        torch.testing.assert_close(ours.grad, theirs.grad)
