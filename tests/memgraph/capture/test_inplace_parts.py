"""Parts of a split that forward changes in place become new values without a second trace, with eager's bits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import memgraph
from memgraph.capture import functionalize
from memgraph.capture.capture import capture
from memgraph.graph.aten_shims import COPY_WITH_STRIDES
from memgraph.graph.nodes import aten
from tests.support.captured_calls import assert_well_formed


class Cells(nn.Module):
    """A cell of a recurrent network in a loop over time steps, and a layer on its last state."""

    def __init__(self, cell: Callable[[int, int], nn.Module], has_two_states: bool) -> None:
        super().__init__()
        self.cell, self.has_two_states = cell(6, 6), has_two_states
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(x.shape[0], 6)
        second = state
        for step in range(x.shape[1]):
            if self.has_two_states:
                state, second = self.cell(x[:, step], (state, second))
            else:
                state = self.cell(x[:, step], state)
        loss: Tensor = self.head(state).pow(2).mean()
        return loss


class ReturnsGates(nn.Module):
    """Returns a part that it has changed in place, and the loss of all parts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 12)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first, second, third = self.layer(x).unsafe_chunk(3, 1)
        gate, other = first.sigmoid_(), second.tanh_()
        return (gate * other * third.exp_()).sum(), gate


class Gated(nn.Module):
    """Changes parts of a split in place, and then reads what it is told to."""

    def __init__(self, read: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.read = nn.Linear(4, 8), read

    def forward(self, x: Tensor) -> Tensor:
        whole = self.layer(x)
        first, second = whole.unsafe_chunk(2, 1)
        changed = first.sigmoid_()
        return self.read(changed, second.tanh_(), whole).sum()


def assert_as_eager(model: nn.Module, x: Tensor) -> None:
    """Loss and gradients of a compiled copy are the same, to the bit."""
    ours = copy.deepcopy(model)
    loss, eager_loss = memgraph.compile(ours, "1GB")(x), model(x)
    loss.backward()
    eager_loss.backward()
    assert torch.equal(loss, eager_loss)
    for ours_parameter, parameter in zip(ours.parameters(), model.parameters(), strict=True):
        assert ours_parameter.grad is not None and parameter.grad is not None
        assert torch.equal(ours_parameter.grad, parameter.grad)


@pytest.mark.long
@pytest.mark.parametrize(("cell", "has_two_states"), [(nn.LSTMCell, True), (nn.GRUCell, False)])
def test_a_loop_over_cells_is_traced_once_and_has_eagers_bits(
    cell: Callable[[int, int], nn.Module], has_two_states: bool
) -> None:
    torch.manual_seed(0)
    model, x = Cells(cell, has_two_states), torch.randn(3, 4, 6)
    with mock.patch.object(functionalize, "make_fx", side_effect=AssertionError("traced a second time")):
        graph = capture(model, (x,), {}).graph.graph
    assert_well_formed(graph)
    assert_as_eager(model, x)


def test_gates_share_a_tensor_as_in_eager() -> None:
    graph = capture(Cells(nn.LSTMCell, True), (torch.randn(3, 4, 6),), {}).graph.graph
    assert not graph.find_nodes(op="call_function", target=COPY_WITH_STRIDES)
    gates = [node.meta["val"] for node in graph.find_nodes(op="call_function", target=aten.slice.Tensor)]
    shared = {gate.untyped_storage()._cdata for gate in gates if gate.stride() == (24, 1)}
    assert len(shared) == 4  # one for each time step


def test_a_part_that_is_changed_after_others_were_read_is_copied_alone() -> None:
    graph = capture(Cells(nn.GRUCell, False), (torch.randn(3, 4, 6),), {}).graph.graph
    cats = graph.find_nodes(op="call_function", target=aten.cat.default)
    wholes = [node for node in cats if node.meta["phase"] == "forward"]
    assert len(wholes) == 4  # two gates of each time step, beside the third part as it was
    assert all(whole.meta["val"].shape == (3, 18) for whole in wholes)


def test_a_part_that_is_returned_is_the_callers() -> None:
    torch.manual_seed(0)
    model, x = ReturnsGates(), torch.randn(5, 4)
    compiled = memgraph.compile(copy.deepcopy(model), "1GB")
    for _ in range(2):
        expected, found = model(x), compiled(x)
        for loss, _ in (expected, found):
            loss.backward()
        assert torch.equal(found[1], expected[1])
    gradients = [[parameter.grad for parameter in each.parameters()] for each in (model, compiled)]
    assert all(a is not None and b is not None and torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("where", ["part", "copy"])
def test_parts_that_are_read_later_are_read_with_their_values(where: str) -> None:
    torch.manual_seed(0)
    reads: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        "part": lambda first, second, whole: first * second,
        "copy": lambda first, second, whole: (first.t() @ second).exp(),
    }
    assert_as_eager(Gated(reads[where]), torch.randn(5, 4))
