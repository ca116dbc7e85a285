"""Caches of functions hold no tensor of a trace, and a forward that keeps one elsewhere is refused without a trace."""

from __future__ import annotations

import copy
import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

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
    def double(self, rows: int) -> tuple[Tensor, dict[str, Tensor]]:
        return self.single(rows) * 2, {"one": torch.ones(rows, 1)}

    def forward(self, x: Tensor) -> Tensor:
        self.kind = (x.shape[1],)
        first, others = self.double(x.shape[0])
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
            kept = ours.double(rows)[0] if make is ByMethods else cached(rows)
            assert type(kept) is Tensor and torch.equal(plain(x), compiled(x))


LOCAL = threading.local()
DEEP: dict[str, Any] = {"a": {"b": {"c": {}}}}


def in_a_thread(part: Any, rows: int) -> Tensor:
    if not hasattr(LOCAL, "tables"):
        LOCAL.tables = {}
    return in_a_dict(LOCAL.tables, rows)


def deep(part: Any, rows: int) -> Tensor:
    return in_a_dict(DEEP["a"]["b"]["c"], rows)


def by_module(part: Any, rows: int) -> Tensor:
    if part not in Keeping.tables:
        Keeping.tables[part] = table(rows)
    return Keeping.tables[part]


def in_a_dict(tables: dict[int, Tensor], rows: int) -> Tensor:
    if rows not in tables:
        tables[rows] = table(rows)
    return tables[rows]


class Keeping(Body):
    tables: ClassVar[weakref.WeakKeyDictionary[nn.Module, Tensor]] = weakref.WeakKeyDictionary()

    def __init__(self, keep: Callable[[Any, int], Tensor]) -> None:
        super().__init__()
        self.keep = keep

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + self.keep(self, x.shape[0])


@pytest.mark.parametrize("keep", [in_a_thread, deep, by_module])
def test_a_tensor_that_is_kept_elsewhere_is_refused_and_removed(keep: Callable[[Any, int], Tensor]) -> None:
    module = Keeping(keep)
    compiled = memgraph.compile(module, ROOM, opaque=False)
    with pytest.raises(memgraph.CaptureError, match=r"forward keeps a tensor \(3, 1\) in a dict outside"):
        compiled(torch.ones(3, 4))
    expected = module(torch.ones(3, 4))
    assert type(expected) is Tensor
    assert torch.equal(memgraph.compile(module, ROOM)(torch.ones(3, 4)), expected)
