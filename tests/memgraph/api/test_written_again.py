"""An attribute that forward sets to its value is set again once the caller changed it; a global is refused by name."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memgraph
from tests.support.compare import ROOM, assert_equal

FLAG: Any = None
FLAGS: dict[str, Any] = {"flag": None}


class Holder:
    flag: Any = None


class Net(nn.Module):
    shared: Any = None

    def __init__(self, what: str) -> None:
        super().__init__()
        self.body, self.what, self.flag = nn.Linear(4, 4), what, None
        self.holder, self.space = Holder(), types.SimpleNamespace(flag=None)
        self.entries: dict[str, Any] = {"flag": None}
        self.items: list[Any] = [None]

    def forward(self, x: Tensor) -> Tensor:
        put(self, self.what, None)
        loss: Tensor = self.body(x).square().mean()
        return loss


WAYS: dict[str, tuple[Callable[[Net], Any], Callable[[Net, Any], object]]] = {
    "an attribute": (lambda net: net.flag, lambda net, value: setattr(net, "flag", value)),
    "one of a submodule": (lambda net: vars(net.body).get("flag"), lambda net, value: setattr(net.body, "flag", value)),
    "one of an object": (lambda net: net.holder.flag, lambda net, value: setattr(net.holder, "flag", value)),
    "one of a namespace": (lambda net: net.space.flag, lambda net, value: setattr(net.space, "flag", value)),
    "an entry": (lambda net: net.entries["flag"], lambda net, value: net.entries.update(flag=value)),
    "an item": (lambda net: net.items[0], lambda net, value: net.items.__setitem__(0, value)),
}
OUTSIDE: dict[str, tuple[Callable[[Net], Any], Callable[[Net, Any], object]]] = {
    "a global": (lambda net: FLAG, lambda net, value: globals().update(FLAG=value)),
    "an entry of a global": (lambda net: FLAGS["flag"], lambda net, value: FLAGS.update(flag=value)),
    "a class attribute": (lambda net: Net.shared, lambda net, value: setattr(Net, "shared", value)),
}


def put(net: Net, what: str, value: Any) -> None:
    (WAYS | OUTSIDE)[what][1](net, value)


@pytest.mark.long
@pytest.mark.parametrize("first", [None, 1])
@pytest.mark.parametrize("what", WAYS)
def test_it_is_left_as_in_eager(what: str, first: Any) -> None:
    plain = Net(what)
    model = memgraph.compile(ours := copy.deepcopy(plain), ROOM)
    for value in (first, None, 2, 3, None, torch.ones(2), 2):
        for module, net in ((plain, plain), (model, ours)):
            put(net, what, value)
            module(torch.ones(2, 4)).backward()
        assert WAYS[what][0](plain) is WAYS[what][0](ours) is None, value


@pytest.mark.parametrize("value", [0.5, "text", (1, 2), [], {}], ids=repr)
def test_an_equal_value_is_left_as_well(value: Any) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.kept = nn.Linear(4, 4), copy.deepcopy(value)

        def forward(self, x: Tensor) -> Tensor:
            self.kept = copy.deepcopy(value)
            out: Tensor = self.body(x)
            return out

    plain = Net()
    model = memgraph.compile(ours := copy.deepcopy(plain), ROOM)
    for step in range(4):
        for module, net in ((plain, plain), (model, ours)):
            if step:
                net.kept = [*net.kept, step] if isinstance(value, list | tuple) else {"step": step}
            module(torch.ones(2, 4)).sum().backward()
        assert plain.kept == ours.kept == value


@pytest.mark.parametrize("what", OUTSIDE)
def test_outside_of_the_module_it_is_so_or_refused(what: str) -> None:
    net = Net(what)
    model = memgraph.compile(net, ROOM)
    with pytest.raises(
        memgraph.CaptureError, match=r"sets .*, and it had another value before, in several kinds of calls"
    ):
        for value in (1, 2, 3):
            put(net, what, value)
            model(torch.ones(2, 4)).backward()
            assert OUTSIDE[what][0](net) is None
    put(net, what, None)


def test_a_metric_computes_anew() -> None:
    metrics = pytest.importorskip("torchmetrics.classification")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.accuracy = nn.Linear(8, 3), metrics.MulticlassAccuracy(3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.body(x)
            self.accuracy.update(out.detach(), torch.tensor([0, 1, 2, 0]))
            return out.square().mean()

    torch.manual_seed(0)
    plain = Net()
    model = memgraph.compile(ours := copy.deepcopy(plain), ROOM)
    for _ in range(4):
        x = torch.randn(4, 8)
        plain(x).backward()
        model(x).backward()
        assert plain.accuracy.compute() == ours.accuracy.compute()


class Recurrent(nn.Module):
    """A hidden state that the caller masks where an episode has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.hidden = nn.GRUCell(4, 4), torch.zeros(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = self.cell(x, self.hidden.detach())
        return self.hidden


def test_a_state_that_forward_cuts_off_may_be_computed_with() -> None:
    torch.manual_seed(0)
    plain = Recurrent()
    model = memgraph.compile(ours := copy.deepcopy(plain), ROOM)
    for step in range(6):
        x = torch.randn(2, 4)
        for module, net in ((plain, plain), (model, ours)):
            if step % 3 == 2:
                net.hidden = net.hidden * torch.tensor([[1.0], [0.0]])
            module(x).square().mean().backward()
        assert torch.equal(plain.hidden, ours.hidden)
        assert_equal([p.grad for p in plain.parameters()], [p.grad for p in ours.parameters()])


class Outside:
    seen: Any = None


class Noting(nn.Module):
    """Leaves a length or a float of its call outside of the module."""

    def __init__(self, note: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.body, self.note, self.rate = nn.Linear(4, 4), note, 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.note(self, x)
        out: Tensor = (self.body(x) * self.rate).square().mean()
        return out


NOTES: dict[str, Callable[[Any, Tensor], None]] = {
    "a length": lambda net, x: setattr(Outside, "seen", x.shape[0]),
    "made of lengths": lambda net, x: setattr(Outside, "seen", tuple(x.shape)),
    "a text of one": lambda net, x: setattr(Outside, "seen", f"{x.shape[0]}"),
    "a float": lambda net, x: setattr(Outside, "seen", net.rate),
}


@pytest.mark.parametrize("what", NOTES)
def test_what_differs_in_each_call_is_not_left_stale_outside(what: str) -> None:
    net = Noting(NOTES[what])
    model = memgraph.compile(net, ROOM)
    with pytest.raises(memgraph.CaptureError, match=r"sets .*seen, and it had another value before"):
        for number in range(5):
            net.rate = 1.0 - number / 10
            model(torch.ones(2 + number if "float" not in what else 2, 4)).backward()
            assert number == 0
