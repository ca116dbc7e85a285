"""Attributes are the module's own, and what forward reads of them takes effect when it changes."""

from __future__ import annotations

import ctypes
import types
from array import array
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memgraph
from tests.support.compare import ROOM, batch
from tests.support.models import Function, Net, Plain


def test_attributes_are_those_of_the_module() -> None:
    module = Net()
    compiled: Any = memgraph.compile(module, ROOM)
    module.note = "a"  # type: ignore[assignment]
    assert compiled.note == "a"
    compiled.note = "b"
    assert module.note == "b"
    del compiled.note
    assert not hasattr(module, "note")
    with pytest.raises(AttributeError, match=r"'Net' object has no attribute 'nothing'"):
        _ = compiled.nothing
    compiled.extra = nn.Parameter(torch.ones(2))
    assert dict(module.named_parameters())["extra"] is compiled.extra
    compiled.drop.p = 0.5
    assert module.drop.p == 0.5


@pytest.mark.parametrize("change", ["attribute", "dropout", "hook"])
def test_what_forward_reads_takes_effect_when_it_changes(change: str) -> None:
    module = Function(lambda linear, x: F.dropout(linear(x), linear.rate) * linear.scale)
    module.linear.rate, module.linear.scale = 0.0, 1.0  # type: ignore[assignment]
    compiled = memgraph.compile(module, ROOM)
    compiled(batch())
    if change == "attribute":
        module.linear.scale = 2.0  # type: ignore[assignment]
    elif change == "dropout":
        module.linear.rate = 1.0  # type: ignore[assignment]
    else:
        module.linear.register_forward_hook(tripled)
    assert torch.equal(compiled(batch()), module(batch()))


def tripled(part: nn.Module, args: Any, result: Tensor) -> Tensor:
    return result * 3


def test_what_forward_counts_in_python_is_refused() -> None:
    class Counting(Plain):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x) * self.calls

    module = Counting()
    module.calls = 0
    with pytest.raises(memgraph.CaptureError, match="forward changes calls from 0 to 1"):
        memgraph.compile(module, ROOM)(batch())
    assert module.calls == 0


@pytest.mark.parametrize("kind_of", [tuple, list, dict, types.SimpleNamespace])
def test_what_forward_reads_in_containers_takes_effect_when_it_changes(kind_of: Any) -> None:
    named = kind_of in (dict, types.SimpleNamespace)

    def function(linear: Any, x: Tensor) -> Tensor:
        held = vars(linear.held) if kind_of is types.SimpleNamespace else linear.held
        return linear(x) * held["scale" if named else 0]

    module: Any = Function(function)
    compiled = memgraph.compile(module, ROOM)
    for scale in (1.0, 2.0):
        module.linear.held = kind_of(scale=scale) if named else kind_of([scale])
        found = compiled(batch())
    assert torch.equal(found, module(batch()))


@pytest.mark.parametrize("whose", ["an object's", "a module's"])
def test_a_dict_of_attributes_that_is_replaced_takes_effect(whose: str) -> None:
    module: Any = Function(lambda linear, x: linear(x) * linear.held.scale * linear.scale)
    module.linear.held, module.linear.scale = type("Held", (), {})(), 1.0
    module.linear.held.scale = 2.0
    compiled = memgraph.compile(module, ROOM)
    compiled(batch())
    if whose == "an object's":
        module.linear.held.__dict__ = {"scale": 5.0}
    else:
        module.linear.__dict__ = {**vars(module.linear), "scale": 5.0}
    assert torch.equal(compiled(batch()), module(batch()))


@pytest.mark.parametrize("content", [bytearray(b"\1"), array("d", [1.0]), (ctypes.c_int * 1)(1)])
def test_the_content_of_a_buffer_takes_effect_when_it_changes(content: Any) -> None:
    module = Function(lambda linear, x: linear(x) * linear.content[0])
    vars(module.linear)["content"] = content
    compiled, x = memgraph.compile(module, ROOM), batch()
    for content[0] in (1, 3, 2):
        assert torch.equal(compiled(x), module(x))
