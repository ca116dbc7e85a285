"""Recomputation uses the indices, masks and order of its own step's batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import memgraph
from memgraph.graph.nodes import tensors
from memgraph.graph.result_layout import REAL, layout_in_storage
from memgraph.graph.rewrite import rewrite
from memgraph.planning import assembly, search
from passes import Recompute
from passes.schedule.schedule import Placement
from tests.support.forced_plans import given_up

WIDTH = 16


class Chosen(nn.Module):
    """A layer, what a function makes of it, and another layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.LazyLinear(4)
        self.function = function
        self(torch.zeros(1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.after(self.function(self.before(x)).tanh())
        return found.square()


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mask": lambda h: h.masked_fill(h > h.mean(), 0.5) * h,
    "where": lambda h: torch.where(h.sin() > 0, h.exp(), h.cos()),
    "sort": lambda h: h.sort(-1)[0] * h.exp(),
    "topk": lambda h: h.exp().topk(5, -1)[0].sin(),
    "gather": lambda h: h.exp().gather(-1, h.argsort(-1)).sin(),
    "rows": lambda h: h.exp()[h.sum(-1).argsort()].sin(),
    "pool": lambda h: nn.functional.max_pool1d(h.exp()[:, None], 2)[:, 0].sin(),
    "row of a table": lambda h: h.exp() * torch.eye(WIDTH)[h.argmax(-1)].cumsum(-1),
}


@pytest.mark.long
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_each_batch_has_its_own(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "make_plan", given_up(Placement.RECOMPUTE_PER_USE))
    plain, model = Chosen(function), Chosen(function)
    compiled = memgraph.compile(model, "1GB", offload=None)
    for seed in range(3):
        x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(seed))
        grads = []
        for run, module in ((plain, plain), (compiled, model)):
            module.zero_grad()
            run(x).mean().backward()
            grads.append([parameter.grad for parameter in module.parameters()])
        assert all(
            one is not None and other is not None and torch.equal(one, other) for one, other in zip(*grads, strict=True)
        )
    assert any(isinstance(decision, Recompute) for decision in compiled.plan.plan)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x)[0].sin().mean()
        return found


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.EmbeddingBag(10, 8, mode="max")

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x).sin().mean()
        return found


@pytest.mark.parametrize("make, x", [(Recurrent, torch.ones(5, 2, 8)), (Bags, torch.arange(8).view(4, 2))])
def test_what_an_op_makes_with_data_it_makes_again(make: Any, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[fx.Graph] = []
    plain = rewrite

    def rewritten(*args: Any) -> fx.Graph:
        graphs.append(plain(*args))
        return graphs[-1]

    monkeypatch.setattr(search, "make_plan", given_up(Placement.RECOMPUTE_PER_USE))
    monkeypatch.setattr(assembly, "rewrite", rewritten)
    memgraph.compile(make(), "1GB", offload=None)(x).backward()
    nodes = {node.name: node for node in graphs[-1].nodes}
    pairs = [(node, nodes[node.meta["again"]]) for node in nodes.values() if REAL in node.meta and "again" in node.meta]
    assert pairs
    for node, source in pairs:
        assert [*map(layout_in_storage, tensors(node))] == [*map(layout_in_storage, tensors(source))]
