"""Equal literals of several graphs are one tensor, so that kept graphs take no more than the one that runs."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import Tensor, nn

from memgraph.capture.capture import capture
from memgraph.capture.constants import share_literals


class Literals(nn.Module):
    """A forward with two literals, and a tensor in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), torch.tensor(2.0)

    def forward(self, x: Tensor, number: float) -> Tensor:
        return (self.linear(x) + torch.tensor(2.0) + torch.tensor(number) + self.scale).sum()


def _constants(model: nn.Module, rows: int, number: float) -> dict[float, list[Tensor]]:
    graph = capture(model, (torch.ones(rows, 4), number), {}).graph
    share_literals(graph)
    found: dict[float, list[Tensor]] = {}
    for node in graph.graph.find_nodes(op="get_attr"):
        value = getattr(graph, str(node.target))
        found.setdefault(value.item(), []).append(value)
    return found


def test_literals_of_equal_value_are_one_tensor_and_those_in_attributes_are_not() -> None:
    model = Literals()
    first, same, other = _constants(model, 2, 1.0), _constants(model, 3, 1.0), _constants(model, 3, 5.0)
    assert first[1.0][0] is same[1.0][0]
    (literal,) = [each for each in first[2.0] if each is not model.scale]
    assert [sum(each is literal for each in found[2.0]) for found in (first, same, other)] == [1, 1, 1]
    assert [sum(each is model.scale for each in found[2.0]) for found in (first, same, other)] == [1, 1, 1]


def test_negative_zero_is_another_literal() -> None:
    model = Literals()
    negative, positive = _constants(model, 2, -0.0), _constants(model, 2, 0.0)
    assert negative[0.0][0] is not positive[0.0][0]


def test_a_literal_goes_with_its_graphs() -> None:
    literal = weakref.ref(_constants(Literals(), 2, 7.25)[7.25][0])
    gc.collect()
    assert literal() is None
