"""Wrong arguments are the TypeError that they are in eager, not a step that can't be captured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

import memgraph

X = torch.ones(3, 8)
WRONG: list[tuple[tuple[Any, ...], Mapping[str, Any]]] = [((), {}), ((X, X), {}), ((X,), {"other": X})]


@pytest.mark.parametrize(("args", "kwargs"), WRONG)
def test_a_call_with_wrong_arguments_fails_as_in_eager(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    module = nn.Linear(8, 8)
    with pytest.raises(TypeError) as eager:
        module(*args, **kwargs)
    compiled = memgraph.compile(module, "1GB")
    with pytest.raises(TypeError) as caught:
        compiled(*args, **kwargs)
    assert (type(caught.value), str(caught.value)) == (TypeError, str(eager.value))
    assert torch.equal(compiled(X), module(X))


@pytest.mark.parametrize("entry", [memgraph.plan, memgraph.sweep])
def test_so_does_a_plan_or_a_sweep_without_arguments(entry: Any) -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'input'"):
        entry(nn.Linear(8, 8))


def test_a_list_without_plans_is_refused() -> None:
    with pytest.raises(ValueError, match=r"plan=\[\] has no plan"):
        memgraph.compile(nn.Linear(4, 4), "1GB", plan=[])


def test_a_loss_without_its_target_says_how_to_pass_one() -> None:
    compiled = memgraph.compile(nn.Linear(8, 8), "1GB", loss=nn.functional.cross_entropy)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'target'") as caught:
        compiled(X)
    assert caught.value.__notes__ == [
        "loss= is a part of the compiled module, and got its outputs alone: call it with target=..."
    ]
    assert compiled(X, target=torch.zeros(3, dtype=torch.long)).ndim == 0
