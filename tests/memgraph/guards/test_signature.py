"""Changes of attributes that forward reads take effect, and changes of others need no new plan."""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import memgraph
from memgraph.guards.assumptions import ATTRIBUTES
from memgraph.guards.attribute_guard import AttributeGuard
from memgraph.guards.signature import signature

ROOM = "1GB"


class Reading(nn.Module):
    """Its forward reads `self.held` with the given function."""

    def __init__(self, held: Any, read: Callable[[Any], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.held, self.read = held, read

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.read(self.held)


@dataclass
class Config:
    scale: float = 1.0


@dataclass(slots=True)
class Slotted:
    scale: float = 1.0


class Plain:
    def __init__(self) -> None:
        self.scale = 1.0
        self.inner = types.SimpleNamespace(scale=1.0)
        self.me = self  # a cycle


def set_item(held: Any, key: Any) -> None:
    held[key] = 2.0


def scale_of(held: Any) -> Any:
    return held.scale


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "dict": (lambda: {"a": 1.0}, lambda held: held["a"], lambda held: set_item(held, "a")),
    "list": (lambda: [1.0], lambda held: held[0], lambda held: set_item(held, 0)),
    "nested": (lambda: {"a": [({"b": 1.0},)]}, lambda held: held["a"][0][0]["b"],
               lambda held: set_item(held["a"][0][0], "b")),
    "set": (lambda: {1.0}, lambda held: sum(held), lambda held: held.add(2.0)),
    "namespace": (lambda: types.SimpleNamespace(scale=1.0), scale_of, lambda held: vars(held).update(scale=2.0)),
    "dataclass": (Config, scale_of, lambda held: setattr(held, "scale", 2.0)),
    "slots": (Slotted, scale_of, lambda held: setattr(held, "scale", 2.0)),
    "object": (Plain, scale_of, lambda held: setattr(held, "scale", 2.0)),
    "object in an object": (Plain, lambda held: held.inner.scale, lambda held: setattr(held.inner, "scale", 2.0)),
    "array": (lambda: np.array([1.0]), lambda held: float(held[0]), lambda held: set_item(held, 0)),
    "array in a list": (lambda: [np.array([1.0])], lambda held: float(held[0][0]),
                        lambda held: set_item(held[0], 0)),
    "tensor in place": (lambda: torch.ones(4), lambda held: held, lambda held: held.mul_(2)),
    "tensor in a list": (lambda: [torch.ones(4)], lambda held: held[0], lambda held: set_item(held, 0)),
    "a module that is no submodule": (lambda: [nn.Dropout(0.0)], lambda held: held[0](torch.ones(4)),
                                      lambda held: setattr(held[0], "p", 1.0)),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", CHANGES)
def test_what_is_changed_inside_of_an_attribute_takes_effect(name: str) -> None:
    make, read, change = CHANGES[name]
    module = Reading(make(), read)
    compiled, x = memgraph.compile(module, ROOM), torch.ones(2, 4)
    before = compiled(x)
    compiled(x)
    if name == "tensor in a list":
        module.held[0] = torch.full((4,), 3.0)
    else:
        change(module.held)
    assert torch.equal(compiled(x), module(x))
    assert not torch.equal(before, compiled(x))


@pytest.mark.long
@pytest.mark.parametrize(
    "make", [lambda: [1.0], lambda: {"a": 1.0}, lambda: torch.ones(4), lambda: np.ones(4), lambda: max]
)
def test_an_attribute_that_is_replaced_takes_effect(make: Any) -> None:
    module = Reading(
        make(),
        lambda held: (
            1.0
            if held is max
            else 2.0
            if held is min
            else torch.as_tensor(list(held.values()) if isinstance(held, dict) else held).sum()
        ),
    )
    compiled, x = memgraph.compile(module, ROOM), torch.ones(2, 4)
    compiled(x)
    module.held = min if module.held is max else [5.0]
    assert torch.equal(compiled(x), module(x))


def test_a_forward_that_is_put_in_the_place_of_a_submodules_takes_effect() -> None:
    module = Reading(1.0, lambda held: held)
    compiled, x = memgraph.compile(module, ROOM), torch.ones(2, 4)
    compiled(x)
    vars(module.linear)["forward"] = lambda x: x * 7
    assert torch.equal(compiled(x), module(x))


@pytest.mark.long
def test_a_configuration_of_transformers_takes_effect() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=20, num_labels=2,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    module = transformers.BertForSequenceClassification(config)
    compiled, x = memgraph.compile(module, ROOM), torch.ones(2, 4, dtype=torch.long)
    labels = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    found = []
    for kind in ("multi_label_classification", "regression"):
        module.config.problem_type = kind
        found.append(compiled(x, labels=labels).loss)
        assert torch.equal(found[-1], module(x, labels=labels).loss)
    assert compiled(x).hidden_states is None
    module.config.output_hidden_states = True
    assert compiled(x).hidden_states is not None


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize("order", [(SDPBackend.MATH, SDPBackend.FLASH_ATTENTION)] * 2)
def test_the_kernel_of_attention_that_was_asked_for_runs(order: Any) -> None:
    module, x = Attention(), torch.randn(2, 2, 8, 8, requires_grad=True)
    compiled = memgraph.compile(module, ROOM)
    for backend in order:
        with sdpa_kernel(backend):
            names = {node.name for node in _nodes(compiled, x)}
        assert any("flash" in name for name in names) == (backend is SDPBackend.FLASH_ATTENTION)


def _nodes(compiled: Any, x: Tensor) -> list[torch.fx.Node]:
    compiled(x).sum().backward()
    return list(compiled._latest.parts.captured.graph.graph.nodes)


def test_the_default_dtype_takes_effect() -> None:
    module = Reading(None, lambda held: torch.ones(4))
    compiled, x = memgraph.compile(module, ROOM), torch.ones(2, 4)
    compiled(x)
    torch.set_default_dtype(torch.float64)
    try:
        assert compiled(x).dtype == module(x).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("place", "by"), [("attribute", True), ("attribute", "x"), *(("dict", by) for by in (1, 0.5, True, "x"))]
)
def test_a_forward_that_counts_is_refused(place: str, by: Any) -> None:
    class Counting(Reading):
        def forward(self, x: Tensor) -> Tensor:
            if place == "dict":
                self.held["steps"] += by
            else:
                self.steps += by
            return self.linear(x)

    module = Counting({"steps": type(by)()}, None)  # type: ignore[arg-type]
    module.steps = type(by)()
    name = r"held\['steps'\]" if place == "dict" else "steps"
    with pytest.raises(memgraph.CaptureError, match=f"forward changes {name} from .* a buffer"):
        memgraph.compile(module, ROOM)(torch.ones(2, 4))
    assert not module.steps
    assert not module.held["steps"]


def test_a_count_that_is_a_buffer_goes_on() -> None:
    class Counting(Reading):
        def __init__(self) -> None:
            super().__init__(None, None)  # type: ignore[arg-type]
            self.register_buffer("steps", torch.zeros((), dtype=torch.long))
            self.steps: Tensor

        def forward(self, x: Tensor) -> Tensor:
            self.steps += 1
            return self.linear(x) * self.steps

    compiled = memgraph.compile(Counting(), ROOM)
    for _ in range(3):
        compiled(torch.ones(2, 4))
    assert compiled.steps == 3


# --- what costs no new plan, and leaves nothing behind


def key_of(module: nn.Module, attributes: AttributeGuard | None = None) -> Any:
    return signature(None, [], attributes or AttributeGuard(module))


def test_equal_values_in_other_objects_are_the_same_key() -> None:
    module = Reading({"a": [1.0, "x"]}, scale_of)
    attributes = AttributeGuard(module)
    before = key_of(module, attributes)
    module.held = {"a": [float("1.0"), "x"]}
    assert key_of(module, attributes) == before == key_of(module)
    assert hash(key_of(module)) == hash(before)


def test_one_is_not_true_and_zero_has_a_sign() -> None:
    keys = {key_of(Reading(held, scale_of))[ATTRIBUTES][-1] for held in (1, True, 1.0, "1")}
    assert len(keys) == 1  # the last token is of `read`, the same for all
    tokens = {
        str(AttributeGuard(Reading(held, scale_of)).groups) for held in ([1], [True], [0.0], [-0.0], [None], [1.0])
    }
    assert len(tokens) == 6


def test_a_parameter_that_is_replaced_is_the_same_key() -> None:
    module = nn.Linear(4, 4)
    attributes = AttributeGuard(module)
    before = key_of(module, attributes)
    module.weight = nn.Parameter(torch.zeros(4, 4))
    assert key_of(module, attributes) == before


def test_a_tensor_in_an_attribute_is_not_kept_alive() -> None:
    module = Reading(torch.ones(4), scale_of)
    attributes = AttributeGuard(module)
    before = attributes.groups
    ref = weakref.ref(module.held)
    module.held = None
    gc.collect()
    assert ref() is None
    module.held = torch.ones(4)
    assert attributes.groups != before


def test_a_walk_ends_where_things_are_deep_or_in_a_circle() -> None:
    held: list[Any] = []
    for _ in range(5000):
        held = [held]
    module = Reading(held, scale_of)
    vars(module)["me"] = [module]
    assert AttributeGuard(module).groups
