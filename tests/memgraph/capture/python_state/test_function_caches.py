"""Caches of functions hold no tensor of a trace."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memgraph
from tests.support.compare import ROOM


def table(rows: int) -> Tensor:
    return torch.arange(rows).float()[:, None].sin()


@functools.lru_cache
def cached(rows: int) -> Tensor:
    return table(rows)


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.kind: Any = None


class ByFunction(Body):
    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + cached(x.shape[0])


class ByMethods(Body):
    """Writes to an attribute as well, so that it is traced twice."""

    @staticmethod
    @functools.cache
    def single(rows: int) -> Tensor:
        return table(rows)

    @functools.lru_cache(4)  # noqa: B019 - as users have it
    def twice(self, rows: int) -> tuple[Tensor, dict[str, Tensor]]:
        return self.single(rows) * 2, {"one": torch.ones(rows, 1)}

    def forward(self, x: Tensor) -> Tensor:
        self.kind = (x.shape[1],)
        first, others = self.twice(x.shape[0])
        return self.body(x) + first * others["one"]


@pytest.mark.parametrize("make", [ByFunction, ByMethods])
def test_the_cache_of_a_function_holds_no_tensor_of_a_trace(make: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    ours = make()
    plain = copy.deepcopy(ours)
    for compiled in (memgraph.compile(ours, ROOM), memgraph.compile(copy.deepcopy(ours), ROOM)):
        for rows in (8, 5, 8):
            x = torch.randn(rows, 4)
            assert torch.equal(compiled(x), plain(x))
            kept = ours.twice(rows)[0] if make is ByMethods else cached(rows)
            assert type(kept) is Tensor and torch.equal(plain(x), compiled(x))


class Failing(Body):
    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x) + cached(x.shape[0])
        self.register_buffer("late", y)
        return y


def test_nor_after_a_call_that_can_not_be_captured() -> None:
    cached.cache_clear()
    with pytest.raises(memgraph.CaptureError, match="registers the buffer late"):
        memgraph.compile(Failing(), ROOM, opaque=False)(torch.ones(6, 4))
    assert type(cached(6)) is Tensor
