"""Ctrl-C while a call is captured is raised after the trace, since an exception in torch's C++ ends the process."""

from __future__ import annotations

import copy
import signal
import warnings
from queue import SimpleQueue

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

import memgraph
from tests.support.compare import ROOM


class Interrupted(nn.Module):
    """Gets Ctrl-C in the middle of a trace, as long as there are any left."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        while isinstance(y, FakeTensor) and not LEFT.empty():
            LEFT.get()
            signal.raise_signal(signal.SIGINT)
        warnings.warn("the end of forward", UserWarning, stacklevel=1)
        return y * 2


LEFT = SimpleQueue[int]()  # interrupts; its state does not show


def test_the_trace_ends_before_the_interrupt_is_raised() -> None:
    LEFT.put(1)
    module = Interrupted()
    plain = copy.deepcopy(module)
    compiled = memgraph.compile(module, ROOM)
    with pytest.warns(UserWarning, match="the end of forward"), pytest.raises(KeyboardInterrupt):
        compiled(torch.ones(2, 4))
    assert all(type(parameter) is nn.Parameter for parameter in module.parameters())
    assert torch.equal(compiled(torch.ones(2, 4)), plain(torch.ones(2, 4)))


def test_a_second_interrupt_is_raised_at_once() -> None:
    LEFT.put(1)
    LEFT.put(1)
    compiled = memgraph.compile(Interrupted(), ROOM)
    with warnings.catch_warnings(record=True) as caught, pytest.raises(KeyboardInterrupt):
        compiled(torch.ones(2, 4))
    assert not [each for each in caught if "the end of forward" in str(each.message)]
