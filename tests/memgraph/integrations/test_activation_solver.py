"""torch.compile saves what the solver chooses: within its share, with eager's gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._functorch import config as functorch

import memgraph
from memgraph.integrations import activation_solver

# Decomposes, and partitions as Inductor does, without a compiler of C++.
BACKEND = "aot_eager_decomp_partition"


def net() -> nn.Module:
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.Tanh()) for _ in range(4)
    ]
    return nn.Sequential(*blocks)


def gradients(model: nn.Module, call: Callable[..., Tensor], x: Tensor) -> list[Tensor]:
    call(x).square().mean().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.long
@pytest.mark.parametrize("share", [0.1, 0.3, 0.5])
@pytest.mark.parametrize("dynamic", [False, True], ids=["sizes", "symbols"])
def test_gradients_are_eagers_and_what_is_saved_is_within_the_share(share: float, dynamic: bool) -> None:
    torch._dynamo.reset()
    asked: list[tuple[float, float, int]] = []
    solve = activation_solver.ActivationSolver.__call__

    def noting(self: Any, memory: list[float], graph: Any, most: float, info: Any, nodes: list[Any]) -> Any:
        saved, rest = solve(self, memory, graph, most, info, nodes)
        assert sorted([*saved, *rest]) == [*range(len(memory))]
        asked.append((sum(memory[place] for place in saved), most, len(rest)))
        return saved, rest

    model, x = net(), torch.randn(32, 64)
    theirs = gradients(plain := copy.deepcopy(model), plain, x)
    with (
        functorch.patch(activation_memory_budget=share, activation_memory_budget_solver=memgraph.ActivationSolver()),
        mock.patch.object(activation_solver.ActivationSolver, "__call__", noting),
    ):
        ours = gradients(model, torch.compile(model, backend=BACKEND, dynamic=dynamic), x)
    assert asked and all(saved <= most for saved, most, _ in asked) and any(rest for *_, rest in asked)
    assert all(map(torch.allclose, ours, theirs))
    torch._dynamo.reset()


def test_compiled_graphs_are_cached_by_the_solver() -> None:
    assert memgraph.ActivationSolver().uuid() == memgraph.ActivationSolver().uuid() != ""
