"""Transforms and compilers of torch on a compiled module: refused with a message, or kept out of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import memgraph
from tests.support.compare import ROOM

X = torch.linspace(-1, 1, 8).view(2, 4)


def made() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 4)


@pytest.mark.long
@pytest.mark.parametrize(
    "transform",
    [
        lambda m: torch.func.vmap(m)(X[None]),
        lambda m: torch.func.grad(lambda x: m(x).sum())(X),
        lambda m: torch.func.jvp(m, (X,), (X,)),
        lambda m: torch.func.jacrev(m)(X),
    ],
)
def test_a_transformation_of_torch_func_is_refused_by_name(transform: Callable[[Any], Any]) -> None:
    compiled = memgraph.compile(made(), ROOM)
    compiled(X)
    with pytest.raises(memgraph.MemgraphError, match=r"torch\.func .* transform the plain module"):
        transform(compiled)
    assert torch.equal(compiled(X), made()(X))


@pytest.mark.parametrize(
    "exported", [lambda m: torch.jit.trace(m, X), lambda m: torch.export.export(m, (X,), strict=False)]
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.*:DeprecationWarning")
def test_an_export_is_refused_by_name(exported: Callable[[Any], Any]) -> None:
    compiled = memgraph.compile(made(), ROOM)
    with pytest.raises(memgraph.MemgraphError, match=r"torch\.export .* give them the plain module"):
        exported(compiled)
    assert torch.equal(compiled(X), made()(X))


@pytest.mark.parametrize("grad", [False, True])
def test_a_forward_derivative_is_refused_and_not_dropped(grad: bool) -> None:
    compiled = memgraph.compile(made(), ROOM)
    with torch.set_grad_enabled(grad), forward_ad.dual_level():
        assert torch.equal(compiled(X), made()(X))
        with pytest.raises(memgraph.MemgraphError, match="differentiated forward"):
            compiled(forward_ad.make_dual(X, X))


def test_torch_compile_leaves_a_compiled_module_as_it_is() -> None:
    plain, module = made(), made()
    compiled = memgraph.compile(module, ROOM)

    def step(model: Any) -> Tensor:
        return (model(X * 2) + 1).square().sum()

    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always", UserWarning)
        loss = torch.compile(step, backend="eager")(compiled)
        whole = torch.compile(compiled, backend="eager")(X)
    assert not [warning for warning in heard if "Dynamo" in str(warning.message)]
    expected = step(plain)
    for value in (loss, expected):
        value.backward()
    assert torch.equal(loss, expected) and torch.equal(whole, plain(X))
    assert plain.weight.grad is not None and module.weight.grad is not None
    assert torch.equal(plain.weight.grad, module.weight.grad)


def test_what_torch_compiled_inside_runs_as_it_is_without_a_warning() -> None:
    plain = made()
    inside: Any = torch.compile(made(), backend="eager")
    compiled = memgraph.compile(nn.Sequential(inside), ROOM)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert torch.equal(compiled(X), plain(X))


def test_an_empty_plan_is_refused_as_such() -> None:
    with pytest.raises(memgraph.PlanError, match="plan is an empty text"):
        memgraph.compile(made(), ROOM, plan=" ")
