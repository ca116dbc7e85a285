"""A compiled container of modules is one still, and a container of compiled modules is refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memgraph

ROOM = "1GB"


class Named(nn.ModuleDict):
    """A dictionary that can be called."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.values():
            x = layer(x)
        return x


class Falsy(nn.Module):
    """Without a length."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y


def sequence() -> Any:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


def test_a_compiled_sequential_is_a_sequence() -> None:
    plain = sequence()
    compiled: Any = memgraph.compile(plain, ROOM)
    assert issubclass(type(compiled), memgraph.CompiledModule)
    assert len(compiled) == 3
    assert compiled[0] is plain[0]
    assert compiled[-1] is plain[2]
    assert list(compiled[1:]) == list(plain[1:])
    assert list(compiled) == list(plain)
    assert plain[1] in compiled
    assert nn.ReLU() not in compiled


@pytest.mark.long
def test_a_layer_that_is_replaced_by_its_place_is_planned_anew() -> None:
    compiled: Any = memgraph.compile(sequence(), ROOM)
    compiled(torch.ones(3, 4))
    compiled[2] = nn.Linear(4, 5)
    assert compiled(torch.ones(3, 4)).shape == (3, 5)


def test_a_compiled_dictionary_of_modules_is_a_dictionary() -> None:
    plain = Named({"first": nn.Linear(4, 4), "second": nn.Tanh()})
    compiled: Any = memgraph.compile(plain, ROOM)
    assert list(compiled) == ["first", "second"]
    assert "first" in compiled
    assert "third" not in compiled
    assert compiled["second"] is plain["second"]
    assert list(compiled.items()) == list(plain.items())


@pytest.mark.parametrize("again", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_and_one_with_a_loss_are_sequences_too(again: Callable[[Any], Any]) -> None:
    compiled: Any = again(memgraph.compile(sequence(), ROOM, loss=torch.mean))
    assert len(compiled) == 3
    compiled(torch.ones(3, 4)).backward()
    assert compiled[0].weight.grad is not None


def test_what_has_no_length_is_true_and_has_none() -> None:
    compiled: Any = memgraph.compile(Falsy(), ROOM)
    assert compiled
    with pytest.raises(TypeError, match="no len"):
        len(compiled)
    assert issubclass(type(compiled), memgraph.CompiledModule)
    assert not hasattr(memgraph.CompiledModule, "__len__")


def compile_it(module: nn.Module) -> object:
    return memgraph.compile(module, ROOM)


def plan_it(module: nn.Module) -> object:
    return memgraph.plan(module, torch.ones(3, 4), budget=ROOM)


@pytest.mark.parametrize("way", [compile_it, plan_it])
def test_a_part_that_is_compiled_already_is_refused_by_its_path(way: Callable[[nn.Module], object]) -> None:
    inner = nn.Sequential(memgraph.compile(nn.Linear(4, 4), ROOM))
    with pytest.raises(TypeError, match=r"model\.1\.0 is compiled already"):
        way(nn.Sequential(nn.Linear(4, 4), inner))


@pytest.mark.parametrize("way", [compile_it, plan_it])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_modules_are_refused_by_their_path(way: Callable[[nn.Module], object]) -> None:
    scripted = torch.jit.script(nn.Linear(4, 4))
    with pytest.raises(TypeError, match=r"model is a .* of torch\.jit"):
        way(scripted)
    with pytest.raises(TypeError, match=r"model\.1 is a .* of torch\.jit"):
        way(nn.Sequential(nn.Linear(4, 4), scripted))
