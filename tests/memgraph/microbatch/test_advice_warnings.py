"""Trying whether a batch may be cut into rows, as the advice of a BudgetError wants to know, warns of nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memgraph


def test_a_trial_of_rows_that_take_gradients_warns_of_nothing(recwarn: pytest.WarningsRecorder) -> None:
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with pytest.raises(memgraph.BudgetError):
            memgraph.compile(nn.Identity(), 1)(torch.ones(64, 64, requires_grad=True))
    finally:
        torch.set_warn_always(always)
    assert not [each for each in recwarn if "requires_grad" in str(each.message)]
