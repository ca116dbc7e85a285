"""A forward may ask of an argument more than its numbers: it is right in each call, or refused by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

import memgraph

BASE = torch.linspace(-1, 1, 16).view(4, 4)


class Asking(nn.Module):
    """Multiplies by 2 if its argument is of a kind, else by 3."""

    def __init__(self, is_of_kind: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.linear, self.is_of_kind = nn.Linear(4, 4), is_of_kind

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * (2.0 if self.is_of_kind(x) else 3.0)).sum()


def plain() -> Tensor:
    return BASE[:2].clone()


def view() -> Tensor:
    return BASE[2:]


def leaf() -> Tensor:
    return plain().requires_grad_()


def result() -> Tensor:
    return leaf() * 1


def parameter() -> Tensor:
    return nn.Parameter(plain())


def hooked() -> Tensor:
    x = leaf()
    x.register_hook(lambda gradient: gradient)
    return x


def has_no_function(x: Tensor) -> bool:
    return x.grad_fn is None


@pytest.mark.parametrize("kinds", [(leaf, result, hooked, leaf), (result, leaf), (leaf, parameter), (parameter, leaf)])
@pytest.mark.parametrize("is_of_kind", [lambda x: x.is_leaf, lambda x: isinstance(x, nn.Parameter), has_no_function])
@pytest.mark.filterwarnings("ignore")
def test_a_leaf_and_a_parameter_are_other_calls(
    is_of_kind: Callable[[Tensor], object], kinds: Sequence[Callable[[], Tensor]]
) -> None:
    module = Asking(is_of_kind)
    step = memgraph.compile(module, "64MB", time_limit=0)
    for make in kinds:
        x = make()
        if is_of_kind is not has_no_function or x.is_leaf:
            assert torch.equal(step(x), module(x))
        else:
            with pytest.raises(memgraph.CaptureError, match="grad_fn of input 0"):
                step(x)


@pytest.mark.parametrize("make", [plain, view, leaf, result, hooked])
@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x.storage_offset(),
        lambda x: x._base is not None,
        lambda x: x._is_view(),
        lambda x: x._version,
        lambda x: x._backward_hooks,
        lambda x: x.retains_grad,
        lambda x: x.is_shared(),
        lambda x: x.is_inference(),
        lambda x: getattr(x, "scale", 0),
    ],
)
def test_what_no_call_is_compared_by_is_refused(ask: Callable[[Tensor], object], make: Callable[[], Tensor]) -> None:
    with pytest.raises(memgraph.CaptureError, match=r"asks for the attribute \w+ of input 0"):
        memgraph.compile(Asking(ask), "64MB", time_limit=0)(make())
