"""A model whose parameters change dtype by `model.to` trains on, with new buffers for its gradients on disk."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch

from tests.support.streamed_state import OPTIMIZERS, batch, chain, far, loss, streamed, tightest

LONG = partial(chain, 12)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_steps_with_another_dtype_are_eagers(dtype: torch.dtype) -> None:
    plain = LONG()
    model = copy.deepcopy(plain)
    theirs, ours = (OPTIMIZERS["sgd"](module.parameters()) for module in (plain, model))
    compiled = streamed(model, tightest(LONG, "sgd") * max(dtype.itemsize, 4) // 4, optimizer=ours, loss=None)
    found = list[set[str]]()
    for kind in (torch.float32, dtype, torch.float32):
        for module, optimizer in ((plain, theirs), (compiled, ours)):
            module.to(kind)
            for _ in range(2):
                loss(module(batch().to(kind))).backward()
                found.append(far(model))
                optimizer.step()
                optimizer.zero_grad()
        assert all(map(torch.equal, compiled.parameters(), plain.parameters()))
    assert sum("gradient" in kinds for kinds in found) >= 4  # with one dtype and with the other
