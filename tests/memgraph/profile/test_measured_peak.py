"""The measured peak counts all allocations from the call to the end of backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memgraph
from memgraph.api import compiled_module
from memgraph.runtime import autograd_function
from tests.support.compare import ROOM, batch

MIB = 2**20


class Beside(nn.Module):
    """Returns a loss and its operands, which get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x).tanh()
        return y.square().mean(), y


def taking(work: Callable[..., Any], held: list[Tensor]) -> Callable[..., Any]:
    """The same computation with one more MiB."""

    def more(*args: Any, **kwargs: Any) -> Any:
        held.append(torch.zeros(MIB, dtype=torch.uint8))
        return work(*args, **kwargs)

    return more


@pytest.mark.parametrize(("where", "name"), [(compiled_module, "eager_gradients"), (autograd_function, "_give")])
def test_what_is_allocated_around_the_halves_is_measured(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str
) -> None:
    held: list[Tensor] = []
    monkeypatch.setattr(where, name, taking(getattr(where, name), held))
    compiled = memgraph.compile(Beside(), ROOM)
    compiled(batch())[0].backward()
    assert held
    assert compiled.plan.measured is not None
    assert compiled.plan.measured > compiled.plan.peak
    assert compiled.plan.measured >= len(held) * MIB
    assert "over the forecast" in str(compiled.plan)


def test_a_forward_without_gradients_is_measured_too() -> None:
    compiled, x = memgraph.compile(Beside(), ROOM), batch()
    with torch.no_grad():
        compiled(x)
    assert compiled.plan.measured is not None
    assert compiled.plan.measured <= compiled.plan.peak
