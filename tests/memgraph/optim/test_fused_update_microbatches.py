"""Backward updates once all micro-batches have contributed their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import memgraph
from tests.support.streamed_state import OPTIMIZERS, TINY, batch, chain, facts, loss, same, streams


def smallest(**wishes: Any) -> int:
    module = chain()
    optimizer = OPTIMIZERS["adamw"](module.parameters())
    with pytest.raises(memgraph.BudgetError) as caught:
        memgraph.plan(module, batch(), budget=TINY, optimizer=optimizer, **wishes)
    return int(caught.value.smallest * 1.05)


@pytest.mark.long
@pytest.mark.parametrize("room", [True, False], ids=["room", "tight"])
def test_a_step_in_parts_with_updates_in_backward_is_the_one_without(room: bool) -> None:
    found: list[Any] = []
    for fuse_update in (False, True):
        module = chain()
        optimizer = OPTIMIZERS["adamw"](module.parameters())
        wishes: dict[str, Any] = {"loss": loss, "microbatches": 3, "reduction": "mean", "time_limit": 0}
        wishes["fuse_update"] = fuse_update
        budget = 10**9 if room else smallest(**wishes)
        model = memgraph.compile(module, budget, optimizer=optimizer, **wishes)
        for seed in range(3):
            model(batch(seed)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert model.plan.measured is not None
        assert model.plan.measured <= model.plan.peak <= budget
        assert bool(streams(model)) != room
        found.append((facts(module, optimizer), [op.phase for op in model.plan.forecast.trace.ops]))
    assert same(found[0][0], found[1][0])
    phases = found[1][1]
    assert phases.count("update") == len(list(chain().parameters()))
    assert "backward" in phases[phases.index("update") :]


def test_updates_in_parts_leave_no_gradient() -> None:
    module = chain(2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model = memgraph.compile(
        module, 10**9, microbatches=4, reduction="sum", loss=lambda out: out.square().sum(), optimizer=optimizer,
        fuse_update=True, time_limit=0,
    )  # fmt: skip
    before = facts(module)
    model(batch()).backward()
    assert all(parameter.grad is None for parameter in module.parameters())
    assert not same(facts(module), before)
