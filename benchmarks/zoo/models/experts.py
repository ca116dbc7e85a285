"""Mixtures of experts, which send each token to some of them."""

from __future__ import annotations

from typing import Any

from ..training import Maker, Training
from .huggingface import VOCABULARY, decoder, made, padding, tokens

ROUTED: dict[str, Any] = {"num_key_value_heads": 2, "moe_intermediate_size": 64, "num_experts_per_tok": 2}


def mixtral() -> Training:
    return decoder("MixtralForCausalLM", num_key_value_heads=2, num_local_experts=4, output_router_logits=True)


def qwen2_moe() -> Training:
    return decoder("Qwen2MoeForCausalLM", **ROUTED, num_experts=4, shared_expert_intermediate_size=64)


def deepseek_v3() -> Training:
    return decoder(
        "DeepseekV3ForCausalLM", moe_intermediate_size=64, num_key_value_heads=4, n_routed_experts=8, n_group=2,
        topk_group=1, num_experts_per_tok=2, first_k_dense_replace=1, q_lora_rank=32, kv_lora_rank=16,
        qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16,
    )  # fmt: skip


def gpt_oss() -> Training:
    return decoder(
        "GptOssForCausalLM", num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2,
        sliding_window=32,
    )  # fmt: skip


def switch_transformers() -> Training:
    sizes = {
        "vocab_size": VOCABULARY, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4,
        "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_decoder_layers": 2, "num_experts": 4,
        "decoder_start_token_id": 0,
    }  # fmt: skip
    batch = tokens()
    batch["decoder_attention_mask"] = padding(*batch["labels"].shape)
    return made("SwitchTransformersForConditionalGeneration", sizes, batch)


EXPERTS: dict[str, Maker] = {
    "mixtral": mixtral,
    "qwen2_moe": qwen2_moe,
    "qwen3_moe": lambda: decoder("Qwen3MoeForCausalLM", **ROUTED, num_experts=4, head_dim=16),
    "olmoe": lambda: decoder("OlmoeForCausalLM", num_key_value_heads=2, num_experts=4, num_experts_per_tok=2),
    "granite_moe": lambda: decoder(
        "GraniteMoeForCausalLM", num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2
    ),
    "deepseek_v3": deepseek_v3,
    "gpt_oss": gpt_oss,
    "switch_transformers": switch_transformers,
}
