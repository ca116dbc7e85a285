"""Models of transformers, with their caches and masks, are captured to the bit; each op knows where it comes from."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from memgraph.capture.capture import capture
from memgraph.tensors.loss_outputs import select_losses
from tests.support import models as nets
from tests.support.captured_calls import agrees

IDS = torch.arange(1, 25).view(2, 12)
MASK = (torch.arange(12) < torch.tensor([[12], [8]])).long()
SMALL: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
}  # fmt: skip
MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: nets.gpt2(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2),
    "bert": lambda: nets.bert(**SMALL),
    "llama": lambda: nets.llama(**SMALL, num_key_value_heads=1),
    "t5": lambda: nets.t5(vocab_size=32, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2),
}


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_language_models_with_their_key_value_caches(name: str) -> None:
    agrees(MODELS[name](), input_ids=IDS, labels=IDS)


def test_a_language_model_under_a_padding_mask() -> None:
    captured = agrees(MODELS["gpt2"](), input_ids=IDS, attention_mask=MASK, labels=IDS, wanted=select_losses)
    assert captured.tangents == (0,) and len(captured.differentiable) > 1


@pytest.mark.long
def test_a_padding_mask_without_padding_takes_the_way_that_eager_takes() -> None:
    ids = torch.randint(1, 32, (4, 24), generator=torch.Generator().manual_seed(0))
    model = nets.llama(**{**SMALL, "hidden_size": 32, "num_attention_heads": 4}, num_key_value_heads=2)
    captured = agrees(model, input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, wanted=select_losses)
    assert captured.guards
    agrees(MODELS["t5"](), input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, context=bfloat16)


@pytest.mark.parametrize("context, asks", [(nullcontext, False), (lambda: bfloat16(), True)])
def test_eager_attention_drops_a_mask_without_padding(context: Any, asks: bool) -> None:
    model = MODELS["bert"]()
    model.set_attn_implementation("eager")  # type: ignore[operator]
    captured = agrees(model, input_ids=IDS, attention_mask=torch.ones_like(IDS), labels=IDS, context=context)
    assert bool(captured.guards) == asks  # adding zeros changes no bits where scores are float32


def bfloat16() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.long
def test_a_vision_model() -> None:
    agrees(
        nets.vit(**SMALL, image_size=8, patch_size=4, num_labels=3),
        pixel_values=torch.randn(2, 3, 8, 8),
        labels=torch.tensor([0, 2]),
    )


def test_transformers_sees_no_tracing_where_values_are_known() -> None:
    graph = capture(MODELS["llama"](), (), {"input_ids": IDS, "labels": IDS, "use_cache": False}).graph.graph
    assert not graph.find_nodes(op="call_function", target=torch.ops.aten.where.self)  # no mask is built


def test_every_op_knows_where_it_comes_from() -> None:
    captured = capture(MODELS["gpt2"](), (), {"input_ids": IDS, "labels": IDS}, wanted=select_losses)
    nodes = captured.graph.graph.nodes
    places = {
        (node.meta["phase"], node.meta["where"].partition(":")[0]) for node in nodes if node.op == "call_function"
    }
    for phase in ("forward", "backward"):
        assert (phase, "transformer.h.1.mlp.act activations.py") in places
        assert (phase, "transformer.h.0.ln_1 modeling_gpt2.py") in places
    weight = next(iter(nodes))
    assert (weight.name, weight.meta["where"], weight.meta["kind"]) == (
        "transformer_wte_weight",
        "transformer.wte.weight",
        "parameter",
    )
