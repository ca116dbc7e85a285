"""A change between forward and backward is an error, or backward goes on with what forward has read."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import memgraph
from passes import Recompute


class Shifted(nn.Module):
    """Eager's backward reads neither `shift` nor the bias; a plan that recomputes the sums does."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.randn(64))
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer((x + self.shift).tanh()).sigmoid() + x
        return x


@pytest.fixture
def x() -> Tensor:
    return torch.randn(512, 64)


@pytest.fixture
def plain() -> Shifted:
    torch.manual_seed(0)
    return Shifted()


@pytest.fixture
def planned(plain: Shifted, x: Tensor) -> memgraph.CompiledModule:
    """Its backward adds the buffer and a bias again."""
    with pytest.raises(memgraph.BudgetError) as caught:
        memgraph.plan(plain, x, budget=1)
    compiled = memgraph.compile(copy.deepcopy(plain), caught.value.smallest, offload=None)
    compiled(x)
    trace = compiled.plan.choice.captured.trace
    read = {name for said in compiled.plan.plan if isinstance(said, Recompute) for name in trace.op[said.value].reads}
    assert {"shift", "layers_0_bias"} <= read, read
    return compiled


def gradients(model: nn.Module, x: Tensor, name: str) -> list[Tensor]:
    """Return the gradients of a step; a tensor of the model gets other numbers before backward."""
    model.zero_grad()
    loss = model(x).square().sum()
    changed = model.get_buffer(name) if name == "shift" else model.get_parameter(name)
    changed.data = changed.detach() * 3
    loss.backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.long
@pytest.mark.parametrize("name", ["shift", "layers.0.bias"])
def test_backward_reads_what_forward_has_read_where_data_is_replaced(
    name: str, plain: Shifted, planned: memgraph.CompiledModule, x: Tensor
) -> None:
    expected = gradients(plain, x, name)
    assert all(map(torch.equal, gradients(planned, x, name), expected))
    assert all(map(torch.equal, planned.state_dict().values(), plain.state_dict().values()))


def test_a_change_in_place_is_an_error_if_backward_reads_it(planned: memgraph.CompiledModule, x: Tensor) -> None:
    loss = planned(x).square().sum()
    planned.get_buffer("shift").mul_(3)
    with pytest.raises(RuntimeError, match=r"modified in place since forward"):
        loss.backward()
