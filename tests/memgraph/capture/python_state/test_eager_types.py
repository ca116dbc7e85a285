"""While a step is captured, `type` says of tensors what it says in eager mode, and of all else what it always says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memgraph


class Kind(type):
    pass


class OfKind(metaclass=Kind):
    pass


class Asks(nn.Module):
    """Returns what `type` says, beside the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.mean: Tensor
        self.said: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x - self.mean)
        made: Any = type("Made", (), {"by": 3})
        self.said = [
            type(x) is Tensor, type(y) is Tensor, type(self.mean) is Tensor, type(self.linear.bias) is nn.Parameter,
            [type(p) for p in self.parameters()] == [nn.Parameter, nn.Parameter], type(self) is Asks,
            isinstance(Asks, type), isinstance(3, type), issubclass(Kind, type), type(Asks) is type,
            type(OfKind) is Kind, type(Asks).__name__, made.by, type(None) is None.__class__, type[int] == type[int],
            type(x.shape) is torch.Size,
        ]  # fmt: skip
        return y.square().mean() * (2 if type(y) is Tensor else 3)


@pytest.mark.parametrize("grad", [True, False])
def test_type_is_that_of_eager_mode(grad: bool) -> None:
    model = Asks()
    x = torch.ones(2, 4, requires_grad=grad)
    expected = model(x)
    said, model.said = model.said, []
    compiled = memgraph.compile(model, "1GB")
    loss = compiled(x)
    assert model.said == said and all(said[k] for k in range(7))
    assert torch.equal(loss, expected)
    assert "type" not in globals()
