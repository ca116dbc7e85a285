"""Dropout in a pipeline draws the numbers that the plain model draws for the micro-batches in turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import memgraph
from memgraph.stages.state.draw_counts import draw_counts, skip
from tests.support.forced_plans import offloading
from tests.support.ranks import on_ranks
from tests.support.staged_models import Batch, in_turn


class Dropouts(nn.Module):
    """Layers with dropout, noise, and a mask that reads nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = F.dropout(layer(x).tanh(), 0.3, self.training)
            if i % 2:
                x = x + 0.1 * torch.randn_like(x) * (torch.rand(8) > 0.2)
        return F.mse_loss(x, y)


class Poisson(Dropouts):
    """The same, and noise that draws as many numbers as its values ask for."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x + 0.1 * torch.poisson(x.detach().abs()), y)


def _made(kind: type[Dropouts], rows: int) -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    return kind(), {"x": torch.randn(rows, 8), "y": torch.randn(rows, 8)}


def _wrong(pipe: memgraph.Pipeline, plain: nn.Module) -> list[str]:
    wanted = dict(plain.named_parameters())
    return [key for key, value in pipe.named_parameters() if not torch.equal(value.grad, wanted[key].grad)]  # type: ignore[arg-type]


def _equal(rank: int, schedule: str, forced: bool) -> list[Any]:
    """Return other gradients after each step, and whether the generator ends where the plain model leaves it."""
    found: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        if forced:
            offloading(patch)
        model, whole = _made(Dropouts, 16)
        plain, _ = _made(Dropouts, 16)
        pipe = memgraph.pipeline(model, "1GB", 5, schedule=schedule)
        pipe.prepare(**whole)
        for step, rows in enumerate((16, 16, 13)):
            batch = {key: value[:rows] for key, value in whole.items()}
            torch.manual_seed(step)
            plain, _ = in_turn(plain, batch, 5)
            after = torch.get_rng_state()
            torch.manual_seed(step if rank == 0 else 99)  # the first rank's generator counts
            pipe.step(**batch)
            found.append([_wrong(pipe, plain), torch.equal(torch.get_rng_state(), after)])
        with torch.no_grad():
            torch.manual_seed(7)
            expected = in_turn_without_gradients(plain, whole)
            torch.manual_seed(7)
            loss = pipe.step(**whole)
        found.append([loss is None or abs(loss.item() - expected) < 1e-6])
    return found


def in_turn_without_gradients(model: nn.Module, batch: Batch) -> float:
    rows = len(batch["x"])
    parts = zip(*(value.chunk(5) for value in batch.values()), strict=True)
    return sum(float(model(*each)) * len(each[0]) / rows for each in parts)


@pytest.mark.long
@pytest.mark.parametrize(
    "schedule, ranks, forced", [("1f1b", 2, False), ("interleaved", 2, True), ("zero_bubble", 3, True)]
)
def test_random_numbers_are_those_of_the_plain_model(schedule: str, ranks: int, forced: bool) -> None:
    for found in on_ranks(ranks, _equal, schedule, forced):
        assert found == [[[], True]] * 3 + [[True]]


def _repeated(rank: int) -> list[bool]:
    """Return what is equal in two trainings with the first rank's seed."""
    runs: list[list[Tensor]] = []
    for others in (1, 2):
        model, batch = _made(Poisson, 8)
        pipe = memgraph.pipeline(model, "1GB", 4)
        pipe.prepare(**batch)
        torch.manual_seed(5 if rank == 0 else others)
        for _ in range(2):
            pipe.step(**batch)
        runs.append([*(each.grad for each in pipe.parameters() if each.grad is not None), torch.get_rng_state()])
    return [torch.equal(first, second) for first, second in zip(*runs, strict=True)]


def test_numbers_that_depend_on_values_are_those_of_the_first_ranks_seed() -> None:
    for equal in on_ranks(2, _repeated):
        assert len(equal) > 1 and all(equal)


OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "bernoulli": lambda x: torch.bernoulli(x, 0.5),
    "dropout": lambda x: torch.native_dropout(x, 0.1, True)[0],
    "rand": lambda x: x + torch.rand(7, 301, dtype=torch.float64),
    "randn": lambda x: torch.randn_like(x),
    "randint": lambda x: x + torch.randint(0, 9, (7, 301)),
    "randperm": lambda x: x + torch.randperm(301),
    "nothing": lambda x: x.sin(),
}


def _graph(op: Callable[[Tensor], Tensor], x: Tensor) -> fx.Graph:
    traced: fx.GraphModule = make_fx(op, tracing_mode="fake")(x)
    return traced.graph


@pytest.mark.parametrize("name", OPS)
def test_skipping_an_op_leaves_the_generator_as_the_op_does(name: str) -> None:
    x = torch.rand(7, 301)
    counts = draw_counts(_graph(OPS[name], x))
    assert counts is not None and bool(counts) == (name != "nothing")
    torch.manual_seed(3)
    torch.rand(5)
    skipped = torch.Generator()
    skipped.set_state(torch.get_rng_state())
    OPS[name](x)
    skip(skipped, sum(counts.values()))
    assert torch.equal(torch.get_rng_state(), skipped.get_state())


def few_normals(x: Tensor) -> Tensor:
    """Draw so few that the generator keeps one for the next op."""
    return torch.randn(3) + x[0, 0]


@pytest.mark.parametrize("op", [torch.poisson, few_normals])
def test_an_op_without_a_fixed_number_of_draws_is_not_counted(op: Any) -> None:
    assert draw_counts(_graph(op, torch.rand(4, 4))) is None
