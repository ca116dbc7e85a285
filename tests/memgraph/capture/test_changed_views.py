"""Outputs that are views of what was changed in place through a view are what they are in eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import memgraph
from tests.support.captured_calls import agrees
from tests.support.compare import ROOM

X = torch.linspace(-1, 1, 16).view(4, 4)


def row(y: Tensor) -> None:
    y[0] = 0


def columns(y: Tensor) -> None:
    y[:, 1:3].mul_(2).t().add_(1)


def flat(y: Tensor) -> None:
    y.view(-1)[3:7].zero_()
    y.mul_(2)


def diagonal(y: Tensor) -> None:
    y.diagonal().fill_(1.0)


WRITES = (row, columns, flat, diagonal)
OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda y: y,
    "detached": lambda y: y.detach(),
    "transposed": lambda y: y.t(),
    "sliced": lambda y: y[:2],
    "flat": lambda y: y.view(-1),
    "several": lambda y: (y[1], y.detach().t(), y),
}


class Written(nn.Module):
    def __init__(self, write: Callable[[Tensor], None], output: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.write, self.output = write, output

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        y = self.first(x).clone()
        self.write(y)
        return self.head(y), self.output(y)


@pytest.mark.long
@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.parametrize("write", WRITES)
def test_an_output_may_be_a_view_of_what_was_changed(write: Callable[[Tensor], None], name: str) -> None:
    agrees(Written(write, OUTPUTS[name]), X)


@pytest.mark.parametrize("write", [row, flat])
def test_they_share_their_memory_as_in_eager(write: Callable[[Tensor], None]) -> None:
    module = Written(write, OUTPUTS["several"])
    found = [tree_leaves(model(X)) for model in (copy.deepcopy(module), memgraph.compile(module, ROOM))]
    for made in found:
        assert len({tensor.untyped_storage().data_ptr() for tensor in made}) == 2
        terms = [(i + 1) * tensor.square().sum() for i, tensor in enumerate(made) if tensor.requires_grad]
        sum(terms, torch.zeros(())).backward()
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


class Kept(Written):
    """Its buffer is given a view of what was changed."""

    held: Tensor

    def __init__(self, write: Callable[[Tensor], None]) -> None:
        super().__init__(write, lambda y: y)
        self.register_buffer("held", torch.zeros(4, 4))

    def forward(self, x: Tensor) -> Any:
        y = self.first(x).clone()
        self.write(y)
        self.held = y.detach().view(-1).view(4, 4)
        return self.head(y).sum()


@pytest.mark.parametrize("write", WRITES)
def test_a_buffer_may_be_given_a_view_of_what_was_changed(write: Callable[[Tensor], None]) -> None:
    agrees(Kept(write), X)


def relaid(does: Callable[[Tensor], Tensor], of_output: bool) -> Callable[[Any, Tensor], Tensor]:
    def forward(module: Any, x: Tensor) -> Tensor:
        before = None if of_output else does(x)
        h: Tensor = module.linear(x)
        return h + x + (does(h) if before is None else before)

    return forward


def transposed(x: Tensor) -> Tensor:
    z = x.detach()
    z.t_()
    return z


def with_new_layout_of_its_base(x: Tensor) -> Tensor:
    y = x * 1
    z = y.detach()
    y.t_()
    return y + z


@pytest.mark.parametrize("of_output", [False, True])
@pytest.mark.parametrize(
    "does",
    [
        transposed,
        with_new_layout_of_its_base,
        lambda x: x.data.t_() * 2,
        lambda x: x.detach().swapdims_(0, 1).add(1),
        lambda x: torch.ops.aten.alias(x).t_(),
        lambda x: x.detach().unsqueeze_(0)[0],
    ],
    ids=["t_", "t_ of the base", "data", "swapdims_", "alias", "unsqueeze_"],
)
def test_an_alias_has_sizes_and_strides_of_its_own(does: Callable[[Tensor], Tensor], of_output: bool) -> None:
    """Else the caller's own tensor would be transposed."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.run = relaid(does, of_output)

        def forward(self, x: Tensor) -> Tensor:
            return self.run(self, x)

    plain = Net()
    ours, x = copy.deepcopy(plain), X.clone()
    found, expected = memgraph.compile(ours, ROOM)(x), plain(X)
    assert torch.equal(found, expected) and torch.equal(x, X)
    found.sum().backward()
    expected.sum().backward()
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]
