"""A budget of eager's own peak is enough, also where eager's loop lets go of what the model has returned."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memgraph
from memgraph.profile.memory_meter import measure_peak, resident_bytes
from memgraph.runtime.released_outputs import FREES_TANGENTS
from passes.ir.liveness import RELEASED
from tests.support.compare import ROOM

IDS = torch.randint(0, 512, (4, 64), generator=torch.Generator().manual_seed(0))
X = torch.randn(4, 64, 64, generator=torch.Generator().manual_seed(1))
Loss = Callable[[nn.Module, Any], Tensor]


class Moco(nn.Module):
    queue: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 32)
        self.register_buffer("queue", torch.randn(32, 8192))

    def forward(self, x: Tensor) -> Tensor:
        q = F.normalize(self.layer(x).flatten(0, 1))
        loss = (q @ self.queue[:, :64].clone()).logsumexp(1).mean()
        with torch.no_grad():
            self.queue[:, : len(q)] = q.t()
        return loss


class Average(nn.Module):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.register_buffer("mean", torch.zeros(64, 64, 64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(y.mean(0))
        return y.square().mean()


class Spectrum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.rfft(self.layer(x)).abs()


class Deep(nn.Module):
    """Its output is large beside what its layers make."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))
        self.wide = nn.Linear(64, 256)

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(self.layers(x)).tanh()


class Text(nn.Module):
    """Returns its loss and its logits, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(512, 32), nn.Linear(32, 512)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.embedding(ids))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()), logits


def pictures() -> nn.Module:
    layers = [(nn.Conv2d(i, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU6(inplace=True)) for i in (4, 8, 8)]
    return nn.Sequential(*(layer for block in layers for layer in block))


def itself(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x)
    return loss


def outside(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def only_the_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)[0]


CASES: dict[str, tuple[Callable[[], nn.Module], Tensor, Loss]] = {
    "queue": (Moco, X, itself),
    "average": (Average, X, itself),
    "spectrum": (Spectrum, X, outside),
    "logits": (Text, IDS, only_the_loss),
    "batch norm": (pictures, X.view(1, 4, 64, 64), outside),
}

handed_over = pytest.mark.skipif(not FREES_TANGENTS, reason="this torch keeps what came to backward until it has ended")


def cases(*lent: str) -> list[Any]:
    """The names of all cases; those of `lent` want a torch that hands gradients over."""
    return [pytest.param(name, marks=handed_over) if name in lent else name for name in CASES]


def eagers(make: Callable[[], nn.Module], x: Tensor, loss: Loss) -> int:
    """The most bytes that there are in an eager step."""
    torch.manual_seed(0)
    model = make()
    there = resident_bytes([*model.parameters(), *model.buffers(), x])
    _, allocated = measure_peak(lambda: loss(model, x).backward())
    assert allocated is not None
    return there + allocated.peak


@pytest.mark.long
@pytest.mark.parametrize("name", cases("spectrum", "logits"))
def test_a_budget_of_eagers_own_peak_fits(name: str) -> None:
    make, x, loss = CASES[name]
    budget = eagers(make, x, loss)
    torch.manual_seed(0)
    plain = make()
    model = memgraph.compile(copy.deepcopy(plain), budget)
    for _ in range(3):
        for one in (plain, model):
            one.zero_grad()
            loss(one, x).backward()
        pairs = zip(plain.parameters(), model.parameters(), strict=True)
        assert all(torch.equal(p.grad, q.grad) for p, q in pairs if p.grad is not None and q.grad is not None)
        assert all(map(torch.equal, plain.buffers(), model.buffers()))
    assert model.plan.measured is not None and model.plan.measured <= model.plan.peak <= budget


@pytest.mark.long
@pytest.mark.parametrize("name", cases("spectrum"))
def test_what_is_measured_with_room_for_all_is_no_more_than_eagers(name: str) -> None:
    make, x, loss = CASES[name]
    torch.manual_seed(0)
    model = memgraph.compile(make(), ROOM)
    loss(model, x).backward()
    assert model.plan.measured is not None
    assert model.plan.measured <= eagers(make, x, loss)


def test_with_room_a_plan_counts_on_nothing() -> None:
    make, x, loss = CASES["logits"]
    model = memgraph.compile(make(), ROOM)
    loss(model, x).backward()
    assert {kind for kind, _ in model.plan.forecast.trace.outputs} == {"output", "gradient"}


@handed_over
def test_outputs_that_are_held_are_refused_before_backward_takes_memory() -> None:
    make, x, loss = CASES["logits"]
    budget = eagers(make, x, loss)
    torch.manual_seed(0)
    plain = make()
    model = memgraph.compile(copy.deepcopy(plain), budget)
    result = model(x)
    with pytest.raises(memgraph.BudgetError, match=r"only if the model's outputs are freed .*\(del outputs;") as raised:
        result[0].backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert raised.value.smallest > budget
    del result
    for one in (plain, model):
        loss(one, x).backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), model.parameters(), strict=True))  # type: ignore[arg-type]
    wider = memgraph.compile(copy.deepcopy(plain), raised.value.smallest)
    kept = wider(x)
    kept[0].backward()
    assert wider.plan.measured is not None and wider.plan.measured <= raised.value.smallest


@handed_over
def test_the_budget_that_is_named_for_held_outputs_is_enough_for_them() -> None:
    def compiled(budget: int) -> nn.Module:
        model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
        return memgraph.compile(model, budget, optimizer=torch.optim.AdamW(model.parameters()), offload=None)

    x = torch.randn(2048, 64)
    with pytest.raises(memgraph.BudgetError) as unplanned:
        compiled(500_000)(x)
    found = re.search(r"before backward, budget=(\d+)", str(unplanned.value))
    assert found
    result = compiled(int(found[1]))(x)
    with pytest.raises(memgraph.BudgetError, match="are still held") as raised:
        result.square().mean().backward()
    result = compiled(raised.value.smallest)(x)
    result.square().mean().backward()


@handed_over
def test_a_gradient_that_is_held_is_counted() -> None:
    model, x = Spectrum(), X
    roomy = memgraph.compile(model, eagers(Spectrum, x, outside))
    roomy(x)
    lent = memgraph.compile(model, int(0.99 * roomy.plan.peak))
    y = lent(x)
    with pytest.raises(memgraph.BudgetError, match="or of their gradients, are still held"):
        y.backward(torch.ones_like(y))


def least(make: Callable[[], nn.Module], x: Tensor, loss: Loss) -> int:
    """The budget that is said to be enough for a loop that lets go of outputs; without that it is not."""
    with pytest.raises(memgraph.BudgetError, match="frees them before backward") as raised:
        loss(memgraph.compile(make(), 300_000, offload=None), x)
    found = re.search(r"before backward, budget=(\d+)", str(raised.value))
    assert found and int(found[1]) < raised.value.smallest
    return int(found[1])


@handed_over
def test_an_evaluation_is_told_nothing_of_backward() -> None:
    with torch.no_grad(), pytest.raises(memgraph.BudgetError) as raised:
        memgraph.compile(Deep(), 1000, offload=None)(X)
    assert "before backward" not in str(raised.value)


@handed_over
@pytest.mark.parametrize("case", [CASES["logits"], (Deep, X, outside)])
def test_the_error_says_what_is_enough_for_a_loop_that_lets_go(
    case: tuple[Callable[[], nn.Module], Tensor, Loss],
) -> None:
    make, x, loss = case
    budget = least(make, x, loss)
    model = memgraph.compile(make(), budget, offload=None)
    loss(model, x).backward()
    assert model.plan.measured is not None and model.plan.measured <= budget


@handed_over
def test_a_budget_for_a_loop_that_lets_go_is_said_to_be_for_calls_that_add_to_nothing() -> None:
    layers = (nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(4))
    model = nn.Sequential(*layers, nn.Linear(64, 8))
    x, optimizer = torch.randn(16, 64), torch.optim.AdamW(model.parameters())
    with pytest.raises(memgraph.BudgetError) as raised:
        memgraph.compile(model, 1000, optimizer=optimizer)(x)
    *_, both, last = str(raised.value).splitlines()
    assert both.startswith("That is for a call that adds to gradients")
    budget = re.search(r"before backward, budget=(\d+) works with accumulate=False", last)
    assert budget and int(budget[1]) < raised.value.smallest
    compiled = memgraph.compile(model, int(budget[1]), optimizer=optimizer, accumulate=False)
    for _ in range(3):
        compiled(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert (compiled.plan.measured or 0) <= int(budget[1])


@handed_over
def test_a_saved_plan_counts_on_what_it_counted_on() -> None:
    budget = least(Deep, X, outside)
    model = memgraph.compile(Deep(), budget, offload=None)
    outside(model, X).backward()
    assert RELEASED in {kind for kind, _ in model.plan.forecast.trace.outputs} and model.plan.plan
    again = memgraph.compile(Deep(), budget, offload=None, plan=model.plan.to_json())
    outside(again, X).backward()
    assert again.plan.plan == model.plan.plan and again.plan.peak == model.plan.peak


class Squared(nn.Module):
    """Returns its loss and what that is made of, which backward reads before it needs most."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.layers(x)
        return y.square().mean(), y


@pytest.mark.long
@handed_over
@pytest.mark.parametrize("held", [lambda y: y, lambda y: y.detach()[:2]])
def test_an_output_that_backward_reads_too_is_refused_where_it_is_held(held: Callable[[Tensor], Tensor]) -> None:
    budget = least(Squared, X, only_the_loss)
    model = memgraph.compile(Squared(), budget, offload=None)
    only_the_loss(model, X).backward()
    model.zero_grad()
    loss, y = model(X)
    y = held(y)
    with pytest.raises(memgraph.BudgetError, match=r"are still held: .*\(del outputs;"):
        loss.backward()
    del y
    loss.backward()
    assert model.plan.measured is not None and model.plan.measured <= model.plan.peak <= budget
