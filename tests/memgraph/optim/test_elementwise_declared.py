"""An optimizer whose class declares that it is elementwise is offloaded, whatever its states are."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import memgraph
from benchmarks.wide import WideAdamW
from memgraph.errors import UpdateError
from memgraph.optim.elementwise import check_windows, declared_elementwise
from tests.support.streamed_state import Twins, batch, chain, far, loss, streams, train


class Derived(WideAdamW):
    """May do otherwise."""


def thin() -> nn.Module:
    return chain(2).to(torch.bfloat16)


def wide(model: nn.Module) -> WideAdamW:
    return WideAdamW(model.parameters(), lr=1e-2)


@pytest.mark.usefixtures("small_windows")
def test_wide_states_of_thin_weights_stream_and_are_eagers() -> None:
    model = thin()
    with pytest.raises(memgraph.BudgetError) as error:
        wishes: dict[str, Any] = {"optimizer": wide(model), "loss": loss, "time_limit": 0, "fuse_update": True}
        memgraph.plan(model, batch().to(torch.bfloat16), budget=1, **wishes)
    twins = Twins(thin, None, budget=int(error.value.smallest * 1.05), optimizer=wide, fuse_update=True)
    for _ in range(2):
        theirs, ours = twins.each(partial(train, x=batch().to(torch.bfloat16)))
        assert torch.equal(theirs, ours)
        assert all(map(torch.equal, twins.module.parameters(), twins.plain.parameters()))
    assert streams(twins.model)
    assert "state" in far(twins.module, twins.ours)


def test_a_class_says_it_of_itself_alone() -> None:
    assert declared_elementwise(WideAdamW)
    assert not declared_elementwise(Derived)
    with pytest.raises(UpdateError, match=r"Derived is not known to update each element"):
        check_windows(Derived(nn.Linear(1, 1).parameters()))
