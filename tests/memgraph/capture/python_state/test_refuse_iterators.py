"""A forward that reads an iterator or a file is refused: each step would get what the first has read."""

from __future__ import annotations

import csv
import functools
import io
import itertools
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import memgraph
from memgraph.capture.capture import capture
from tests.support.captured_calls import agrees

X = torch.linspace(-1, 1, 8).view(2, 4)
NUMBERS = iter([1.0, 2.0, 3.0])
LOG = logging.getLogger(__name__)


def generated() -> Iterator[float]:
    while True:
        yield 2.0
        yield 3.0


KINDS: dict[str, Callable[[], Any]] = {
    "list": lambda: iter([1.0, 2.0, 3.0]),
    "generator": generated,
    "expression": lambda: (float(i) for i in range(9)),
    "cycle": lambda: itertools.cycle([1.0, 2.0]),
    "count": lambda: itertools.count(1),
    "zip": lambda: zip([1.0, 2.0, 3.0], strict=True),
    "map": lambda: map(float, range(9)),
    "enumerate": lambda: enumerate([1.0, 2.0, 3.0]),
    "keys": lambda: iter({1.0: 0, 2.0: 0}),
    "text": lambda: io.StringIO("1\n2\n3\n"),
    "bytes": lambda: io.BytesIO(b"1\n2\n3\n"),
    "csv": lambda: csv.reader(["1", "2", "3"]),
    "loader": lambda: iter(DataLoader(TensorDataset(torch.arange(8.0)), batch_size=1)),
}


def number(taken: Any) -> Any:
    while isinstance(taken, (tuple, list)):
        taken = taken[-1]
    return taken if isinstance(taken, Tensor) else float(taken)


class Reading(nn.Linear):
    """Reads an object, wherever it is."""

    def __init__(self, held: Any, take: Callable[[Any], Any] = next) -> None:
        super().__init__(4, 4)
        self.held, self.take = held, take

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * number(self.take(self.held))


class Caught(Reading):
    """Goes on without the object that it can't read, having asked for a value before."""

    def forward(self, x: Tensor) -> Tensor:
        y = nn.Linear.forward(self, x)
        y = y if y.sum() > 0 else -y
        try:
            return y * number(self.take(self.held))
        except Exception:
            return y


@pytest.mark.parametrize("kind", KINDS)
def test_what_forward_takes_is_refused_by_name(kind: str) -> None:
    with pytest.raises(memgraph.CaptureError, match=r"forward reads held \(.*which changes it.*as an argument"):
        capture(Reading(KINDS[kind]()), (X,), {})


class Box:
    inner: Any


class Slotted:
    __slots__ = ("inner",)

    def __init__(self, inner: Any) -> None:
        self.inner = inner


def defaulted(held: Iterator[float] = NUMBERS) -> float:
    return next(held)


def boxed(held: Any) -> Box:
    box = Box()
    box.inner = held
    return box


PLACES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], str]] = {
    "dict": (lambda held: {"a": [held]}, lambda box: next(box["a"][0]), r"held\['a'\]\[0\]"),
    "tuple": (lambda held: (1, held), lambda box: next(box[1]), r"held\[1\]"),
    "object": (boxed, lambda box: next(box.inner), r"held\.inner"),
    "global": (lambda held: None, lambda box: next(NUMBERS), r".*NUMBERS"),
    "read by a method": (lambda held: io.StringIO("3\n"), lambda file: file.readline(), "held"),
    "bound": (lambda held: held.__next__, lambda take: take(), "held"),
    "partial": (lambda held: functools.partial(next, held), lambda take: take(), r"held\[0\]"),
    "closure": (
        lambda held: [lambda: next(held)],
        lambda box: box[0](),
        r"the variable held that .*<lambda> closes over",
    ),
    "default": (lambda held: None, lambda box: defaulted(), r"a default of defaulted\[0\]"),
    "slot": (lambda held: Slotted(held), lambda box: next(box.inner), r"held\.inner"),
    "sent": (lambda held: generated(), lambda sent: sent.send(None), "held"),
}


@pytest.mark.parametrize("place", PLACES)
def test_it_is_found_where_it_is_and_left_as_it_was(place: str) -> None:
    held = iter([1.0, 2.0, 3.0])
    put, take, name = PLACES[place]
    model = Reading(put(held), take)
    box = model.held
    with pytest.raises(memgraph.CaptureError, match=rf"forward reads (0\.)?{name} \("):
        capture(nn.Sequential(model), (X,), {})
    assert list(held) == [1.0, 2.0, 3.0] and model.held is box


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_what_a_hook_closes_over_is_read_too(register: str) -> None:
    held, model = iter([1.0, 2.0]), nn.Sequential(nn.Linear(4, 4))
    getattr(model[0], register)(lambda part, x, *y: (y or x)[0] * next(held))
    with pytest.raises(memgraph.CaptureError, match=r"forward reads the variable held that .*<lambda> closes over"):
        capture(model, (X,), {})
    assert list(held) == [1.0, 2.0]


def test_a_forward_that_goes_on_without_it_is_refused_too() -> None:
    held = iter([1.0, 2.0, 3.0])
    with pytest.raises(memgraph.CaptureError, match="forward reads held"):
        capture(Caught(held), (X,), {})
    assert list(held) == [1.0, 2.0, 3.0]


class Iterating(nn.Module):
    """Makes iterators of its own, logs, and has one that it does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.names, self.unread = nn.ModuleList([nn.Linear(4, 4)]), {"a": 2.0}, iter([1, 2])
        self.stream = sys.stderr

    def forward(self, x: Tensor) -> Tensor:
        for layer, (_, scale) in zip(self.layers, self.names.items(), strict=True):
            LOG.info("layer")
            self.stream.write("")
            x = layer(x) * scale
        return x


def test_a_forward_may_make_iterators_and_write_to_files() -> None:
    model = Iterating()
    captured = capture(model, (X,), {})
    assert captured.tangents == (0,) and list(model.unread) == [1, 2]
    del model.unread, model.stream  # which can't be copied
    model.stream = io.StringIO()
    agrees(model, X)
