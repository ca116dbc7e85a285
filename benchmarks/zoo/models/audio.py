"""Sound and time series of transformers."""

from __future__ import annotations

from typing import Any

import torch

from ..training import Maker, Training
from .huggingface import SMALL, VOCABULARY, made, padding
from .sequences import BART

ROWS = 4
SOUND = {
    **SMALL, "vocab_size": 32, "conv_dim": [32, 32, 32, 32, 32], "conv_kernel": [10, 3, 3, 3, 2],
    "conv_stride": [5, 2, 2, 2, 2], "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
}  # fmt: skip


def ctc(model: str, **config: Any) -> Training:
    """Return the training of a recognizer of speech, with stock SpecAugment and LayerDrop."""
    mask = padding(ROWS, 6400)
    inputs = {
        "input_values": torch.randn(ROWS, 6400) * mask, "attention_mask": mask,
        "labels": torch.randint(1, 32, (ROWS, 8)),
    }  # fmt: skip
    return made(model, {**SOUND, **config}, inputs)


def whisper() -> Training:
    sizes = {**BART, "num_mel_bins": 16, "max_source_positions": 64, "max_target_positions": 64}
    special = {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 2}
    labels = torch.randint(5, VOCABULARY, (ROWS, 32))
    inputs = {"input_features": torch.randn(ROWS, 16, 128), "labels": labels}
    return made("WhisperForConditionalGeneration", {**sizes, **special}, inputs)


def spectrogram_transformer() -> Training:
    sizes = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_length": 128, "num_mel_bins": 64,
    }  # fmt: skip
    inputs = {"input_values": torch.randn(ROWS, 128, 64), "labels": torch.randint(2, (ROWS,))}
    return made("ASTForAudioClassification", sizes, inputs)


def patch_tst() -> Training:
    sizes = {
        "num_input_channels": 4, "context_length": 128, "patch_length": 8, "patch_stride": 8, "d_model": 32,
        "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64, "prediction_length": 16,
    }  # fmt: skip
    inputs = {"past_values": torch.randn(16, 128, 4), "future_values": torch.randn(16, 16, 4)}
    return made("PatchTSTForPrediction", sizes, inputs)


def series(model: str) -> Training:
    """Return the training of a forecaster of time series."""
    sizes = {
        "prediction_length": 16, "context_length": 32, "lags_sequence": [1, 2, 3], "d_model": 32,
        "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
        "num_time_features": 2,
    }  # fmt: skip
    past, rows = 35, 16
    inputs = {
        "past_values": torch.randn(rows, past), "past_time_features": torch.randn(rows, past, 2),
        "past_observed_mask": torch.ones(rows, past), "future_values": torch.randn(rows, 16),
        "future_time_features": torch.randn(rows, 16, 2),
    }  # fmt: skip
    return made(model, sizes, inputs)


AUDIO: dict[str, Maker] = {
    "wav2vec2": lambda: ctc("Wav2Vec2ForCTC"),
    "hubert": lambda: ctc("HubertForCTC"),
    "whisper": whisper,
    "spectrogram_transformer": spectrogram_transformer,
    "patch_tst": patch_tst,
    "time_series_transformer": lambda: series("TimeSeriesTransformerForPrediction"),
    "informer": lambda: series("InformerForPrediction"),
}
