"""Run a loop with a plain module and with a compiled one whose plan keeps no value.

assert_alike(lambda model: [model(x)], make)     results, gradients, parameters, buffers, random numbers: to the bit
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memgraph
from memgraph.planning import search
from passes import Machine, PlanResult, Trace
from passes.analysis.reuse_gaps import ReuseGaps
from passes.schedule.schedule import Placement
from tests.support.compare import Fact, Loop, assert_equal
from tests.support.forced_plans import choice, linked

WIDTH = 8


def assert_alike(loop: Loop, make: Callable[[], nn.Module], **wishes: Any) -> memgraph.CompiledModule:
    """Check that a loop has the same results with both modules; return the compiled one."""
    _, theirs = _facts(loop, make())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "make_plan", given_up)
        model, ours = _facts(loop, memgraph.compile(make(), 10**9, **wishes))
    assert_equal(theirs, ours)
    return model


def batch(rows: int = 6, seed: int = 5) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def linear(inputs: int = WIDTH, outputs: int = WIDTH) -> nn.Linear:
    """Return a layer from a fixed seed."""
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs)


class Function(nn.Module):
    """Two linear layers, and a function of them."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function, self.a, self.b = function, linear(), linear()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def _facts(loop: Loop, model: Any) -> tuple[Any, list[Fact]]:
    torch.manual_seed(1)
    found = list(loop(model))
    found += [fact for p in model.parameters() for fact in (p, p.grad)]
    return model, [None if x is None else x.detach().clone() for x in (*found, *model.buffers(), torch.get_rng_state())]


def given_up(
    trace: Trace, machine: Machine, log: object = None, seconds: float = 0.0, interruptible: bool = False
) -> PlanResult:
    """Replace `make_plan`: recompute values for each use where possible, and offload the others."""
    gaps = ReuseGaps(trace)
    fates = {
        s: Placement.OFFLOAD_BLOCKING if trace.op[gaps.producer[s]].once else Placement.RECOMPUTE_PER_USE
        for s in gaps.producer
    }
    legal = {s: fate for s, fate in fates.items() if fate is Placement.RECOMPUTE_PER_USE or s in gaps.whole_value}
    return choice(gaps, legal, linked(machine))
