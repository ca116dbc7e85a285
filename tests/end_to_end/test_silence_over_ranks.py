"""Where no budget can hold, an error says so before an update: for `compile`, and for a sharded optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel

import memgraph
from tests.support.compare import ROOM
from tests.support.ranks import on_ranks

TINY = 10_000  # bytes, in which no step of `net` fits


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))


def batch() -> Tensor:
    return torch.ones(16, 64)


def said(step: Callable[[], object], module: nn.Module) -> str:
    """Return the error of a step that changes nothing; empty if there is none."""
    before = [parameter.detach().clone() for parameter in module.parameters()]
    try:
        step()
    except memgraph.MemgraphError as error:
        assert all(map(torch.equal, before, module.parameters()))
        return type(error).__name__
    return ""


def steps(module: Any, made: Callable[[Any], Any], averages: str) -> list[str]:
    """The errors of a budget that no plan keeps, another forward, a wrapper, and other parameters."""

    def compiled(budget: int | str) -> tuple[Any, Any]:
        optimizer = made(module)
        return memgraph.compile(module, budget, optimizer=optimizer, time_limit=0.0), optimizer

    def stepped(model: Any, optimizer: Any) -> Callable[[], None]:
        def step() -> None:
            model(batch()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    found = [said(stepped(*compiled(TINY)), module)]
    model, optimizer = compiled(ROOM)
    stepped(model, optimizer)()
    model.forward = lambda x: module[2](module[1](module[0](x)))
    found.append(said(stepped(model, optimizer), module))
    del model.forward
    if averages:
        found.append(said(stepped(DistributedDataParallel(model), optimizer), module))
    for i in (0, 2):
        module[i].weight = nn.Parameter(module[i].weight.detach().clone())
        module[i].bias = nn.Parameter(module[i].bias.detach().clone())
    return [*found, said(stepped(model, optimizer), module)]


def test_a_compiled_module_says_where_its_budget_can_not_hold() -> None:
    found = steps(net(), lambda module: optim.SGD(module.parameters(), lr=0.1), "")
    assert found == ["BudgetError", "MemgraphError", "UpdateError"]


def _sharded(rank: int) -> list[str]:
    return steps(net(), lambda module: memgraph.OSS(module.parameters(), optim.SGD, lr=0.1), "too")


def test_a_compiled_module_with_a_sharded_optimizer_says_so_on_all_ranks() -> None:
    expected = ["BudgetError", "MemgraphError", "ShardError", "UpdateError"]
    assert on_ranks(2, _sharded) == [expected, expected]


def test_a_forward_around_the_planned_one_and_one_without_gradients_are_let_be() -> None:
    model = memgraph.compile(net(), ROOM)
    planned = model.forward
    model.forward = lambda x: 2 * planned(x)
    model(batch()).sum().backward()
    model.forward = lambda x: x
    with torch.no_grad():
        assert torch.equal(model(batch()), batch())
    with pytest.raises(memgraph.MemgraphError, match="forward of this compiled Sequential was replaced"):
        model(batch())
