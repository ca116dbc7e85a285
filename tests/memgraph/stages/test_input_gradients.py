"""Tensors of the mini-batch get their gradients, on the rank whose stage makes them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memgraph
from passes.stages.pipeline_schedule import SCHEDULES
from tests.support.ranks import on_ranks


class Two(nn.Module):
    """Reads `x` in its first and last layers, and `scale`, which has no rows, in the last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))

    def forward(self, x: Tensor, scale: Tensor, y: Tensor, unread: Tensor) -> Tensor:
        z = x
        for layer in self.layers:
            z = layer(z).tanh()
        return F.mse_loss(z * scale + x, y)


def _given(rows: int) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    unread = torch.randn(rows, 2, requires_grad=True)
    x, scale = torch.randn(rows, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    return Two(), {"x": x, "scale": scale, "y": torch.randn(rows, 8), "unread": unread}


def _gradients(rank: int, schedule: str, rows: int) -> list[str]:
    """Return the names of the batch's tensors that have the gradients of eager after two steps."""
    model, batch = _given(rows)
    plain, wanted = copy.deepcopy(model), {key: value.detach().clone() for key, value in batch.items()}
    for key, value in batch.items():
        wanted[key].requires_grad_(value.requires_grad)
    pipe = memgraph.pipeline(model, "1GB", 3, schedule=schedule, replicated=["scale"])
    for _ in range(2):
        pipe.step(**batch)
        divided = [value.chunk(3) if value.dim() > 1 else [value] * 3 for value in wanted.values()]
        for each in zip(*divided, strict=True):
            (plain(*each) * (len(each[0]) / rows)).backward()
    assert batch["unread"].grad is None
    found = [key for key, value in batch.items() if value.grad is not None]
    for key in found:
        assert torch.equal(batch[key].grad, wanted[key].grad), key  # type: ignore[arg-type]
    return found


@pytest.mark.long
@pytest.mark.parametrize("rows", [6, 7])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_tensors_of_the_batch_get_their_gradients(schedule: str, rows: int) -> None:
    first, last = on_ranks(2, _gradients, schedule, rows)
    assert sorted((*first, *last)) == ["scale", "x"]


def test_the_result_of_an_op_is_refused() -> None:
    model, batch = _given(6)
    with pytest.raises(ValueError, match="detach"):
        memgraph.pipeline(model, "1GB", 3, replicated=["scale"]).step(**(batch | {"x": 2 * batch["x"]}))


def test_tensors_of_other_rows_are_refused_by_name() -> None:
    model, batch = _given(6)
    with pytest.raises(ValueError, match=r"'scale' has 8 rows, and others have 6.*replicated=\['scale'\]"):
        memgraph.pipeline(model, "1GB", 3).step(**batch)
    with pytest.raises(ValueError, match=r"1 has 8 rows.*replicated=\[1\]"):
        memgraph.pipeline(model, "1GB", 3).step(*batch.values())
    memgraph.pipeline(model, "1GB", 3, replicated=[1]).step(*batch.values())
