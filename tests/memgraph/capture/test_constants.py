"""Equal literals of several graphs are one tensor, so that kept graphs take no more than the one that runs."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import memgraph
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


class Tables(nn.Module):
    """Plain tensors over one memory."""

    def __init__(self, cut: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.cos, self.sin = cut(torch.arange(8.0).view(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.cos + self.sin.sum()).sum()


@pytest.mark.parametrize(
    "cut",
    [
        lambda table: table.unbind(),
        lambda table: (table[0], table),
        lambda table: (table.flatten()[:4], table.t()),
        lambda table: (torch.view_as_complex(table.view(4, 2)).real, table[1]),
    ],
)
def test_plain_tensors_that_share_memory_are_read_and_counted_once(cut: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
    module = Tables(cut)
    plain = copy.deepcopy(module)
    compiled = memgraph.compile(module, "1GB")
    for rows in (torch.ones(2, 4), torch.full((2, 4), 3.0)):
        loss, expected = compiled(rows), plain(rows)
        loss.backward()
        expected.backward()
        assert torch.equal(loss, expected)
    assert module.linear.weight.grad is not None and plain.linear.weight.grad is not None
    assert torch.equal(module.linear.weight.grad, plain.linear.weight.grad)
    tables = [op for op in compiled.plan.forecast.trace.ops if op.fn == "buffer"]
    assert len(tables) == 2 and sum(op.nbytes for op in tables) == 32
