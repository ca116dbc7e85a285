"""Run a loop with a compiled module and with the plain one, and compare the results.

    assert_alike(steps, Net)

Most loops run with plans that keep no value, and some of them also with a large budget.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memgraph
from tests.support.models import Net

ROOM = "1GB"
Fact = Tensor | None
Loop = Callable[[Any], Sequence[Fact]]
both = pytest.mark.usefixtures("room_or_tight")
tight = pytest.mark.usefixtures("given_up")


def assert_alike(loop: Loop, make: Callable[[], nn.Module] = Net, **wishes: Any) -> None:
    """Check that a loop has the same results with the compiled module and with the plain one."""
    assert_equal(run(make, loop, False), run(make, loop, True, **wishes))


def assert_equal(theirs: Sequence[Fact], ours: Sequence[Fact]) -> None:
    """Check that the results of eager and of the compiled module are bit-equal."""
    assert len(theirs) == len(ours)
    for i, (their, our) in enumerate(zip(theirs, ours, strict=True)):
        assert (their is None) == (our is None), f"fact {i}: eager {their}, compiled {our}"
        if their is not None and our is not None:
            assert their.dtype == our.dtype
            assert torch.equal(their, our), f"fact {i}: eager {their}, compiled {our}"


def run(make: Callable[[], nn.Module], loop: Loop, compiled: bool, **wishes: Any) -> list[Fact]:
    """Run a loop; return its results, and the state of the module and of the generator after it."""
    torch.manual_seed(0)
    module = make()
    given = memgraph.compile(module, ROOM, **wishes) if compiled else module
    torch.manual_seed(1)
    found = loop(given)
    return [
        None if fact is None else fact.detach().clone() for fact in (*found, *facts_of(module), torch.get_rng_state())
    ]


def same_gradients(ours: nn.Module, theirs: nn.Module) -> bool:
    """Return True if each parameter has a gradient, and the gradients of two modules are bit-equal."""
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return all(p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad) for p, q in pairs)


def facts_of(module: nn.Module) -> list[Fact]:
    return [*(p.grad for p in module.parameters()), *(p.detach() for p in module.parameters()), *module.buffers()]


def steps(model: Any, count: int = 3) -> list[Fact]:
    """Train with SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found: list[Fact] = []
    for step in range(count):
        loss = model(batch(seed=step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss)
    return found


def batch(rows: int = 6, seed: int = 5) -> Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed))
