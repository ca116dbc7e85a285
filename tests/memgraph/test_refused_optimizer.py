"""An optimizer that can't be planned is refused with what to do instead, and that works."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import memgraph
from tests.streamed import batch, chain, far, loss, streamed, tightest


def train(model: nn.Module, optimizer: torch.optim.LBFGS) -> None:
    def again() -> Tensor:
        optimizer.zero_grad()
        found = loss(model(batch()))
        found.backward()
        return found

    optimizer.step(again)


def test_with_a_closure_a_model_trains_far_once_its_optimizer_is_left_out() -> None:
    plain = chain()
    model = copy.deepcopy(plain)
    theirs, ours = (torch.optim.LBFGS(module.parameters(), max_iter=3) for module in (plain, model))
    with pytest.raises(TypeError, match=r"LBFGS can't be planned.*compile without optimizer="):
        memgraph.compile(model, 1 << 30, optimizer=ours)(batch())
    compiled = streamed(model, tightest(kind=None), loss=None)
    for _ in range(2):
        train(plain, theirs)
        train(compiled, ours)
        assert all(map(torch.equal, compiled.parameters(), plain.parameters()))
    assert "parameter" in far(model)
