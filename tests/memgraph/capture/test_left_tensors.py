"""A tensor that forward leaves where no step would put one is refused, wherever that is."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from logging.handlers import MemoryHandler
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memgraph
from tests.support.compare import ROOM


class Storage:
    """A trainer pushes one on a stack around each step, for forward to log into."""

    def __init__(self) -> None:
        self.scalars: dict[str, Any] = {}
        self.latest: Any = None
        self.history: deque[Any] = deque()

    def put(self, name: str, value: Any) -> None:
        self.scalars[name] = value


STACK: list[Storage] = []


def storage() -> Storage:
    return STACK[-1]


def keep(value: Tensor) -> Callable[[], Tensor]:
    return lambda: value


LOG = logging.Logger("of a test")
LOG.addHandler(MemoryHandler(100))
LEAVES: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "an entry": (
        lambda value: storage().put("loss", value),
        "the entry 'loss' of a dict, of the attribute 'scalars' of a Storage",
    ),
    "an attribute": (lambda value: setattr(storage(), "latest", value), "'latest' of a"),
    "an item": (lambda value: storage().history.append(value), "a deque"),
    "a closure": (lambda value: storage().put("loss", keep(value)), "a variable of an enclosing function"),
    "a tuple": (lambda value: storage().put("loss", (value, 1)), "a tuple, of the entry 'loss' of a dict"),
    "a log": (
        lambda value: LOG.warning("loss %s", value),
        "a tuple, of the attribute 'args' of a LogRecord",
    ),
}


class Net(nn.Module):
    def __init__(self, leave: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.body, self.leave = nn.Linear(4, 4), leave

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.body(x).square().mean()
        self.leave(loss.detach())
        return loss


@pytest.mark.parametrize("where", LEAVES)
def test_it_is_refused_by_what_holds_it(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.memgraph.capture.test_left_tensors.STACK", [Storage()])
    leave, holder = LEAVES[where]
    with pytest.raises(memgraph.CaptureError, match=f"leaves a tensor in .*{holder}|{holder}"):
        memgraph.compile(Net(leave), ROOM)(torch.randn(2, 4))


def test_numbers_and_what_is_gone_again_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.memgraph.capture.test_left_tensors.STACK", [Storage()])

    def leave(value: Tensor) -> None:
        storage().put("loss", value)
        storage().scalars.pop("loss")

    memgraph.compile(Net(leave), ROOM)(torch.randn(2, 4)).backward()
    assert not storage().scalars
