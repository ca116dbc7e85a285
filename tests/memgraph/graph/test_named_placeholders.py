"""Names of modules with capital letters, as those of T5, leave no second variable in the code of a half."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import fx, nn

import memgraph
from memgraph.graph.nodes import named_placeholder
from memgraph.optim import offloaded_update
from tests.support.smallest_budget import smallest_of
from tests.support.streamed_state import WIDTH, batch, loss


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6))
    return nn.Sequential(OrderedDict((f"SelfAttention_{i}", layer) for i, layer in enumerate(layers)))


@pytest.mark.parametrize("name", ["w", "DenseReluDense_wo", "a_B", "A"])
def test_an_input_has_one_name(name: str) -> None:
    graph = fx.Graph()
    node = named_placeholder(graph, name)
    graph.output((graph.call_function(torch.neg, (node,)),))
    code = fx.GraphModule(nn.Module(), graph).code
    assert node.name == node.target == name
    assert f"{name} = None" in code and code.count(f"{name} =") == 1


@pytest.mark.long
@pytest.mark.usefixtures("small_windows")
def test_what_is_reloaded_is_freed_behind_its_last_use() -> None:
    assert offloaded_update.SMALLEST < 1 << 20
    model = net()
    adam = torch.optim.Adam(model.parameters())
    wishes: dict[str, Any] = {"optimizer": adam, "loss": loss, "time_limit": 0}
    least = smallest_of(lambda: memgraph.plan(model, batch(), budget=1, **wishes))
    compiled = memgraph.compile(model, int(1.05 * least), **wishes)
    for seed in range(3):
        adam.zero_grad()
        compiled(batch(seed)).backward()
        adam.step()
    for step in compiled.__dict__["_kept"].steps:
        for half in (step.parts.halves.forward, step.parts.halves.backward):
            assert all(node.target == node.name for node in half.graph.find_nodes(op="placeholder"))
    report = compiled.plan
    assert report.measured is not None and report.measured <= report.peak <= report.budget
