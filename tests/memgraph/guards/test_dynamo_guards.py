"""Dynamo's guards as an oracle: each place that they look at, changed alone, makes another call of it here too.

self._modules['transformer'].config.use_cache is False    ->    with True no capture serves the call

The models are those of the zoo that Dynamo captures in one graph.
"""

from __future__ import annotations

import logging
import re
import sys
import types
import warnings
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from enum import EnumMeta
from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import memgraph
from benchmarks.zoo.architectures import ARCHITECTURES
from benchmarks.zoo.facts import seed
from benchmarks.zoo.torchvision_ops import import_torchvision
from benchmarks.zoo.training import Training
from memgraph.guards.module_attributes import WRITTEN_BY_SAVE
from memgraph.guards.packages import is_library, module_of

LAST = re.compile(r"^(.*?)(?:\.(\w+)|\['(\w+)'\]|\[(\d+)\])$", re.DOTALL)  # the place that a guard's source ends with
OF_CLASS = re.compile(r"^dict\((type\(.*\)\S*)\.__dict__\)$")  # the content of a class
# Dynamo takes another way through these than a trace does.
OTHER_WAY = ("packed_sequence_mask_function", "remap_positions_for_packed_sequence")
OF_LIBRARIES = ("inspect", "vmap.__kwdefaults__")
# A flag of torch's, names of classes and functions, and what memgraph leaves out.
UNREAD = ("call_super_init", "__name__", "__module__", *WRITTEN_BY_SAVE)
# What stands there is not replaced as a whole: torch keeps the numbers of hooks beside the hooks, which count.
KEPT = (
    "_modules", "_parameters", "_buffers", "__class__", "__getattribute__", "_hooks_with_kwargs", "_hooks_always_called",
)  # fmt: skip
ALIKE = 4  # layers of a model, say
ON_VALUES = (
    "longformer", "reformer", "switch_transformers", "led", "video_mae", "wav2vec2", "hubert", "time_series_transformer",
    "informer", "tv_ssd", "rgcn", "graph_unet", "routed",
)  # fmt: skip
LEFT_OUT = {
    **dict.fromkeys(ON_VALUES, "Dynamo breaks its graph where it branches on values or sizes that depend on them"),
    **dict.fromkeys(("bigbird", "packed_lstm", "packed_gru", "ctc"), "Dynamo can't trace a function of torch or numpy"),
    **dict.fromkeys(("recurrent_gemma", "detr", "yolos"), "memgraph refuses it"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_no_place_of_a_guard_of_dynamos_is_missed(name: str) -> None:
    library = ARCHITECTURES[name].library
    if find_spec(library) is None:
        pytest.skip(f"{name}: {library} is not installed")
    if name in LEFT_OUT:
        pytest.skip(f"{name}: {LEFT_OUT[name]}")
    import_torchvision()
    seed(0)
    training = ARCHITECTURES[name].make()
    training.model(*training.args, **training.kwargs)  # the first call of a classifier writes to its configuration
    places = places_of(training)
    compiled = memgraph.compile(training.model, "16GB")
    compiled(*training.args, **training.kwargs)
    missed = [place.source for place in places if is_missed(place, compiled, training)]
    assert len(places) > (5 if library == "torch" else 30) and not missed


class Place(NamedTuple):
    """A place that a guard looks at: an attribute or an item of its owner, what is there, and another value."""

    source: str
    owner: Any
    name: Any
    is_attribute: bool
    value: Any
    new: Any


def is_missed(place: Place, compiled: memgraph.CompiledModule, training: Training) -> bool:
    """Return True if a capture serves the call while a place has another value; one has to, before and after."""
    kept: Any = compiled.__dict__["_kept"]

    def is_served() -> bool:
        call = kept.read(training.args, dict(training.kwargs), compiled.__dict__["_outputs"])
        return any(variant.assumptions.holds(call.facts) for variant in kept.variants)

    assert is_served(), place.source
    with changed(place):
        missed = is_served()
    assert is_served(), place.source
    return missed


def places_of(training: Training) -> list[Place]:
    """Return the places of Dynamo's guards that can be changed alone; a few of those that differ in numbers alone."""
    found, alike = list[Place](), Counter[str]()
    for source, value in guards_of(training).items():
        place = place_of(source, value, training.model)
        if place is not None and not any(name in source for name in OTHER_WAY):
            alike[like := re.sub(r"\d+", "0", source)] += 1
            found += [place] if alike[like] <= ALIKE else []
    return found


def guards_of(training: Training) -> dict[str, Any]:
    """Return what Dynamo has guards on, by the expression that it looks each up by."""
    found: dict[str, Any] = {}

    def record(entries: Any) -> list[bool]:
        found.update({entry.name: entry.value for entry in entries if entry.has_value})
        return [True] * len(entries)

    def constants(graph: Any, inputs: Any) -> Any:
        with torch.no_grad():
            outputs = graph(*inputs)
        return lambda *args: outputs

    torch._dynamo.reset()
    warns: Any = getattr(logging.Logger, "warning_once", logging.Logger.warning)  # of transformers
    with torch._dynamo.config.patch(
        capture_scalar_outputs=True,
        capture_dynamic_output_shape_ops=True,
        allow_rnn=True,
        ignore_logging_functions={warns, warnings.warn},
    ):
        compiled: Any = torch.compile(
            training.model, backend=constants, fullgraph=True, options={"guard_filter_fn": record}
        )
        compiled(*training.args, **training.kwargs)
    torch._dynamo.reset()
    return found


class Globals(dict[str, Any]):
    """The globals of a model's file, and the files that Dynamo has imported by names of its own."""

    def __missing__(self, name: str) -> Any:
        return sys.modules[name.removeprefix("__import_").replace("_dot_", ".")]


def place_of(source: str, value: Any, model: nn.Module) -> Place | None:
    """Return the place that a guard looks at.

    None for a place of torch's or Python's library, and for one that can't be found or changed.
    """
    match, new = LAST.match(source), other(source, value)
    is_copy = source.startswith(("G['__builtins", "list("))
    if match is None or new is None or is_copy or source.removesuffix("']").endswith(KEPT):
        return None
    prefix, attribute, key, index = match.groups()
    content, of_class = type(model).forward.__globals__, OF_CLASS.match(prefix)
    try:
        names = {"self": model, "G": Globals(content)}
        owner = content if prefix == "G" else eval(of_class[1] if of_class else prefix, names)
        holder = eval(prefix.rpartition(".__closure__")[0], names) if isinstance(owner, types.CellType) else owner
        name: Any = attribute or key or int(index)
        now = vars(owner)[name] if of_class else getattr(owner, name) if attribute else owner[name]
    except (AttributeError, KeyError, NameError, TypeError):  # of a frame inside of others, say
        return None
    is_theirs = is_library(_file(holder)) and not isinstance(owner, nn.Module | dict | list)
    is_theirs = is_theirs or isinstance(owner, EnumMeta)  # whose members can't be assigned
    is_nested = isinstance(owner, dict) and prefix.startswith("dict.__getitem__(G")  # in registries of packages
    if now is not value or is_theirs or is_nested or name in UNREAD or any(name in prefix for name in OF_LIBRARIES):
        return None
    return Place(source, owner, name, bool(of_class or attribute), value, new)


@contextmanager
def changed(place: Place) -> Iterator[None]:
    """Put the other value in a place for a block."""
    owner, name = place.owner, place.name
    inside = getattr(owner, "__dict__", {}) if place.is_attribute else owner
    if isinstance(inside, dict | list) and (not place.is_attribute or name in inside):  # past what checks attributes
        inside[name] = place.new
        try:
            yield
        finally:
            inside[name] = place.value
        return
    before = dict(inside)
    setattr(owner, name, place.new)
    try:
        yield
    finally:
        if name not in before and name in inside:
            delattr(owner, name)
        else:
            setattr(owner, name, before.get(name, place.value))


def other(source: str, value: Any) -> Any:
    """Return another value; None if there is none for this type."""
    if value is None and "._buffers" in source:
        return torch.ones(2)
    if value is None and "._parameters" in source:
        return nn.Parameter(torch.ones(2))
    if value is None:
        return (1,) if source.endswith("__defaults__") else 1
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    if type(value) in (list, tuple):
        return type(value)([*value, 1])
    if type(value) in (dict, OrderedDict):
        return type(value)({**value, "another": 1})
    if isinstance(value, type):
        return types.new_class("Other", (), {})
    return (lambda *args, **kwargs: None) if isinstance(value, types.FunctionType) else None


def _file(owner: Any) -> str:
    return module_of(owner if isinstance(owner, type | types.ModuleType | types.FunctionType) else type(owner))
