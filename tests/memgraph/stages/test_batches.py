"""Mini-batches of any nesting are divided as torch.chunk does; random numbers are drawn once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memgraph
from memgraph.stages.chunks import chunked
from tests.support.ranks import on_ranks


@pytest.mark.parametrize("rows, chunks, sizes", [(7, 4, [2, 2, 2, 1]), (2, 4, [1, 1]), (5, 4, [2, 2, 1]), (1, 3, [1])])
def test_rows_are_divided_as_torch_does(rows: int, chunks: int, sizes: list[int]) -> None:
    x = torch.arange(rows * 2.0).view(rows, 2)
    batches = chunked(({"x": (x, [x])},), {"scale": torch.tensor(2.0), "table": torch.ones(1, 9)}, chunks)
    parts = [each.args[0]["x"][0] for each in batches]
    assert [len(part) for part in parts] == sizes == [len(each.args[0]["x"][1][0]) for each in batches]
    assert torch.equal(torch.cat(parts), x) and sum(each.share for each in batches) == pytest.approx(1.0)
    assert all(len(each.kwargs["table"]) == 1 and each.kwargs["scale"] == 2.0 for each in batches)


@pytest.mark.long
def test_many_kinds_of_mini_batches_are_warned_of_once() -> None:
    model = nn.Linear(2, 2)
    pipe = memgraph.pipeline(model, "1GB", 2, loss=lambda result: result.square().mean())
    with pytest.warns(RuntimeWarning, match="pad_to_buckets") as caught:
        for rows in (*range(2, 40, 2), 2):
            pipe.step(torch.randn(rows, 2))
    assert len(caught) == 1 and pipe.report.schedule.chunks == 2


class Nested(nn.Module):
    """Takes tuples and dicts, an integer tensor and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layers = nn.Embedding(8, 6), nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, given: dict[str, Any], pair: tuple[Tensor, Tensor], *, power: int = 1) -> Tensor:
        x = self.table(given["ids"]) + pair[0]
        for layer in self.layers:
            x = torch.where(given["mask"], layer(x).tanh(), x)
        return F.mse_loss(x**power, pair[1])


def _nested(rank: int) -> list[str]:
    torch.manual_seed(0)
    model, rows = Nested(), 5
    plain = copy.deepcopy(model)
    given = {"ids": torch.randint(0, 8, (rows,)), "mask": torch.rand(rows, 6) > 0.5}
    pair = torch.randn(rows, 6), torch.randn(rows, 6)
    pipe = memgraph.pipeline(model, "1GB", 4)
    pipe.step(given, pair, power=2)
    for each in chunked((given, pair), {"power": 2}, 4):
        (plain(*each.args, **each.kwargs) * each.share).backward()
    wanted = dict(plain.named_parameters())
    return [name for name, each in pipe.named_parameters() if not torch.equal(each.grad, wanted[name].grad)]  # type: ignore[arg-type]


@pytest.mark.long
def test_tuples_and_dicts_are_divided() -> None:
    assert on_ranks(3, _nested) == [[]] * 3


def _dropped(rank: int) -> list[dict[str, bytes]]:
    """Return the gradients without recomputation and with it, in the same stages."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5)) for _ in range(8)))
    x, y = torch.randn(20, 16), torch.randn(20, 16)
    found: list[dict[str, bytes]] = []
    begins = None
    for checkpoint in ("never", "always"):
        given: dict[str, Any] = {"loss": lambda result, target: F.mse_loss(result, target), "balance": begins}
        pipe = memgraph.pipeline(copy.deepcopy(model), "1GB", 10, checkpoint=checkpoint, **given)
        pipe.prepare(x, target=y)
        begins = pipe.report.cut.begins
        torch.manual_seed(1)
        pipe.step(x, target=y)
        found.append({name: each.grad.numpy().tobytes() for name, each in pipe.named_parameters()})  # type: ignore[union-attr]
    return found


def test_what_is_recomputed_draws_the_same_numbers() -> None:
    (never, always), (other, again) = on_ranks(2, _dropped)
    assert (never, other) == (always, again)
    assert len({**never, **other}) == 16
