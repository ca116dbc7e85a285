"""Decoders and encoders of text, called with padded rows and labels."""

from __future__ import annotations

import torch

from ..training import Maker, Training
from .huggingface import ROWS, SMALL, VOCABULARY, decoder, encoder, made, tokens


def gpt2() -> Training:
    sizes = {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4}
    return made("GPT2LMHeadModel", sizes, tokens())


def xlnet() -> Training:
    sizes = {"vocab_size": VOCABULARY, "d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 128}
    return made("XLNetForSequenceClassification", sizes, tokens(labels="rows"))


def albert() -> Training:
    return encoder("AlbertForMaskedLM", embedding_size=32)


def electra() -> Training:
    batch = tokens()
    batch["labels"] = (torch.rand(batch["input_ids"].shape) < 0.15).long()
    return made("ElectraForPreTraining", {**SMALL, "embedding_size": 32}, batch)


def longformer() -> Training:
    batch = tokens(length=128)
    batch["global_attention_mask"] = torch.zeros_like(batch["input_ids"]).index_fill(1, torch.tensor([0]), 1)
    return made("LongformerForMaskedLM", {**SMALL, "attention_window": 32}, batch)


def reformer() -> Training:
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 64, "feed_forward_size": 128, "attention_head_size": 16,
        "num_attention_heads": 4, "axial_pos_shape": (8, 16), "axial_pos_embds_dim": (16, 48), "is_decoder": True,
        "attn_layers": ["local", "lsh"], "local_attn_chunk_length": 32, "lsh_attn_chunk_length": 32,
        "num_buckets": 8,
    }  # fmt: skip
    batch = tokens(length=128)
    return made("ReformerModelWithLMHead", sizes, batch)


def bigbird() -> Training:
    return encoder("BigBirdForMaskedLM", length=192, block_size=8, num_random_blocks=2)


def funnel() -> Training:
    sizes = {"vocab_size": VOCABULARY, "d_model": 64, "d_head": 16, "n_head": 4, "d_inner": 128, "block_sizes": [1, 1]}
    return made("FunnelForMaskedLM", sizes, tokens())


def layoutlm() -> Training:
    batch = tokens(labels="")
    corner = torch.randint(0, 500, (ROWS, 64, 2))
    batch["bbox"] = torch.cat((corner, corner + torch.randint(1, 400, corner.shape)), -1)
    batch["labels"] = torch.randint(2, batch["input_ids"].shape)
    return made("LayoutLMForTokenClassification", SMALL, batch)


TEXT: dict[str, Maker] = {
    "gpt2": gpt2,
    "llama": lambda: decoder("LlamaForCausalLM", num_key_value_heads=2),
    "gemma3": lambda: decoder("Gemma3ForCausalLM", num_key_value_heads=2, head_dim=16, sliding_window=32),
    "phi3": lambda: decoder("Phi3ForCausalLM", pad_token_id=1),
    "gpt_neox": lambda: decoder("GPTNeoXForCausalLM"),
    "bloom": lambda: decoder("BloomForCausalLM", n_layer=2, n_head=4),
    "falcon": lambda: decoder("FalconForCausalLM"),
    "opt": lambda: decoder("OPTForCausalLM", ffn_dim=128, word_embed_proj_dim=64),
    "bert": lambda: encoder("BertForMaskedLM"),
    "roberta": lambda: encoder("RobertaForSequenceClassification", labels="rows"),
    "distilbert": lambda: encoder("DistilBertForMaskedLM", dim=64, hidden_dim=128, n_layers=2, n_heads=4),
    "albert": albert,
    "electra": electra,
    "deberta_v2": lambda: encoder(
        "DebertaV2ForMaskedLM", relative_attention=True, position_buckets=16, pos_att_type=["p2c", "c2p"]
    ),
    "esm": lambda: encoder("EsmForMaskedLM", pad_token_id=1, mask_token_id=2),
    "xlnet": xlnet,
    "funnel": funnel,
    "longformer": longformer,
    "bigbird": bigbird,
    "reformer": reformer,
    "layoutlm": layoutlm,
}
