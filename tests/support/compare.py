"""Whatever loop is run, it does to a compiled module what it does to the plain one.

    assert_alike(steps, Net)

Most loops are run with plans that give up all that can be given up, and some of them with room for everything as well.
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
    """The loop does to the compiled module what it does to the plain one."""
    assert_equal(run(make, loop, False), run(make, loop, True, **wishes))


def assert_equal(theirs: Sequence[Fact], ours: Sequence[Fact]) -> None:
    """What eager and the compiled module have come to is the same, to the bit."""
    assert len(theirs) == len(ours)
    for i, (their, our) in enumerate(zip(theirs, ours, strict=True)):
        assert (their is None) == (our is None), f"fact {i}: eager {their}, compiled {our}"
        if their is not None and our is not None:
            assert their.dtype == our.dtype
            assert torch.equal(their, our), f"fact {i}: eager {their}, compiled {our}"


def run(make: Callable[[], nn.Module], loop: Loop, compiled: bool, **wishes: Any) -> list[Fact]:
    """What comes out of a loop: what it returns, and the state of the module and of the generator afterwards."""
    torch.manual_seed(0)
    module = make()
    given = memgraph.compile(module, ROOM, **wishes) if compiled else module
    torch.manual_seed(1)
    found = loop(given)
    return [
        None if fact is None else fact.detach().clone() for fact in (*found, *facts_of(module), torch.get_rng_state())
    ]


def same_gradients(ours: nn.Module, theirs: nn.Module) -> bool:
    """Whether two modules have the same gradients, to the bit, and each parameter has one."""
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return all(p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad) for p, q in pairs)


def facts_of(module: nn.Module) -> list[Fact]:
    return [*(p.grad for p in module.parameters()), *(p.detach() for p in module.parameters()), *module.buffers()]


def steps(model: Any, count: int = 3) -> list[Fact]:
    """Steps of SGD."""
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
