"""Dynamo's guards as an oracle: each place that they look at, changed alone, makes another call of it here too.

self._modules['transformer'].config.use_cache is False    ->    with True no capture serves the call
"""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

import memgraph
from memgraph.guards.packages import is_library, module_of
from memgraph.tensors.pytree import flatten

LAST = re.compile(r"^(.*?)(?:\.(\w+)|\['(\w+)'\])$", re.DOTALL)  # the place that a guard's source ends with
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
# Dynamo takes another way through these than a trace does.
OTHER_WAY = ("packed_sequence_mask_function", "remap_positions_for_packed_sequence")
IDS = torch.arange(16).view(2, 8)
LABELLED = {"input_ids": IDS, "labels": IDS}

MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, torch.Tensor]]] = {
    "gpt2": (
        lambda: GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=50, use_cache=False)), LABELLED
    ),
    "llama": (lambda: LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=50, use_cache=False)), LABELLED),
    "bert": (lambda: BertForMaskedLM(BertConfig(**SIZES, vocab_size=50)), LABELLED),
    "bart": (
        lambda: BartForConditionalGeneration(
            BartConfig(
                d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
                encoder_ffn_dim=32, decoder_ffn_dim=32, vocab_size=50, use_cache=False,
            )
        ), LABELLED
    ),
    "vit": (
        lambda: ViTForImageClassification(ViTConfig(**SIZES, image_size=16, patch_size=8)),
        {"pixel_values": torch.ones(2, 3, 16, 16), "labels": torch.tensor([0, 1])},
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_no_place_of_a_guard_of_dynamos_is_missed(name: str) -> None:
    make, batch = MODELS[name]
    model = make()
    model(**batch)  # the first call of a classifier writes to its configuration
    guards = guards_of(model, batch)
    compiled = memgraph.compile(model, "4GB")
    compiled(**batch)
    kept: Any = compiled.__dict__["_kept"]
    leaves, spec = flatten(((), batch))

    def is_served() -> bool:
        _, call = kept.read(spec, leaves, compiled.__dict__["_outputs"])
        return any(variant.assumptions.holds(call.facts) for variant in kept.variants)

    assert is_served()
    changed, missed = 0, list[str]()
    for source, value in guards.items():
        place = place_of(source, value, model)
        if place is None or any(name in source for name in OTHER_WAY):
            continue
        with replaced(*place):
            changed += 1
            missed += [source] if is_served() else []
        assert is_served(), source
    assert changed > 30 and not missed


def guards_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
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
    compiled: Any = torch.compile(model, backend=constants, options={"guard_filter_fn": record})
    compiled(**batch)
    return found


class Globals(dict[str, Any]):
    """The globals of a model's file, and the files that Dynamo has imported by names of its own."""

    def __missing__(self, name: str) -> Any:
        return sys.modules[name.removeprefix("__import_").replace("_dot_", ".")]


def place_of(source: str, value: Any, model: nn.Module) -> tuple[Any, str, bool, Any] | None:
    """Return the owner of what a guard looks at, its name there, whether that is an attribute, and another value.

    None for a place of torch's or Python's library, and for one that can't be found or changed.
    """
    match, new = LAST.match(source), other(value)
    if "._parameters" in source and value is None:
        new = nn.Parameter(torch.ones(2))
    if match is None or new is None or source.startswith(("G['__builtins", "dict(")):
        return None
    prefix, attribute, key = match.groups()
    content = vars(sys.modules[type(model).__module__])
    try:
        owner = content if prefix == "G" else eval(prefix, {"self": model, "G": Globals(content)})
        now = getattr(owner, attribute) if attribute else owner[key]
    except (AttributeError, KeyError, NameError, TypeError):  # of a frame inside of others, say
        return None
    is_theirs = is_library(_file(owner)) and not isinstance(owner, nn.Module | dict)
    is_nested = isinstance(owner, dict) and prefix.startswith("dict.__getitem__(G")  # in registries of packages
    if now is not value or is_theirs or is_nested or "inspect" in prefix:
        return None
    return owner, attribute or key, bool(attribute), new


@contextmanager
def replaced(owner: Any, name: str, is_attribute: bool, new: Any) -> Iterator[None]:
    inside = owner if not is_attribute else vars(owner)
    before = dict(inside)
    put = owner.__setitem__ if not is_attribute else lambda name, value: setattr(owner, name, value)
    try:
        put(name, new)
        yield
    finally:
        put(name, before.get(name, new))
        if isinstance(inside, dict) and list(inside) != list(before):
            inside.clear()
            inside.update(before)


def other(value: Any) -> Any:
    """Return another value; None if there is none for this type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    if value is None:
        return 1
    return (lambda *args, **kwargs: None) if isinstance(value, types.FunctionType) else None


def _file(owner: Any) -> str:
    return module_of(owner if isinstance(owner, type | types.ModuleType | types.FunctionType) else type(owner))
