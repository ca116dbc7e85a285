"""Encoders with decoders, and models that go over a sequence step by step."""

from __future__ import annotations

from typing import Any

import torch

from ..training import Maker, Training
from .huggingface import SMALL, VOCABULARY, decoder, made, tokens

BART = {
    "vocab_size": VOCABULARY, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "max_position_embeddings": 128,
}  # fmt: skip


def bart(model: str, **sizes: Any) -> Training:
    """Return the training of a model of BART's kind."""
    return made(model, {**BART, **sizes}, tokens())


def t5() -> Training:
    sizes = {
        "vocab_size": VOCABULARY, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4,
        "decoder_start_token_id": 0,
    }  # fmt: skip
    return made("T5ForConditionalGeneration", sizes, tokens())


def led() -> Training:
    sizes = {**BART, "attention_window": 32, "max_encoder_position_embeddings": 256}
    return made("LEDForConditionalGeneration", sizes, tokens(length=96))


def mamba() -> Training:
    return decoder("MambaForCausalLM", length=32, state_size=8)


def mamba2() -> Training:
    return decoder("Mamba2ForCausalLM", head_dim=16, num_heads=8, state_size=16, n_groups=2, chunk_size=32)


def rwkv() -> Training:
    batch = tokens(length=32)
    return made("RwkvForCausalLM", {**SMALL, "context_length": 64}, batch)


def recurrent_gemma() -> Training:
    return decoder("RecurrentGemmaForCausalLM", num_hidden_layers=3, num_key_value_heads=1, lru_width=64)


def encoder_decoder() -> Training:
    import transformers

    halves = [
        transformers.BertConfig(**SMALL),
        transformers.BertConfig(**SMALL, is_decoder=True, add_cross_attention=True),
    ]
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(*halves)
    config.decoder_start_token_id, config.pad_token_id = 2, 1
    batch = tokens()
    batch["decoder_attention_mask"] = torch.ones_like(batch["labels"])
    return Training(transformers.EncoderDecoderModel(config=config).train(), kwargs=batch)


SEQUENCES: dict[str, Maker] = {
    "t5": t5,
    "bart": lambda: bart("BartForConditionalGeneration"),
    "mbart": lambda: bart("MBartForConditionalGeneration"),
    "pegasus": lambda: bart("PegasusForConditionalGeneration"),
    "marian": lambda: bart("MarianMTModel", pad_token_id=1, decoder_start_token_id=1),
    "led": led,
    "bert2bert": encoder_decoder,
    "mamba": mamba,
    "mamba2": mamba2,
    "rwkv": rwkv,
    "recurrent_gemma": recurrent_gemma,
}
