"""The head of a configuration's model, and the batch that trains it.

bert                                    BertForMaskedLM, called with input_ids and labels
whisper                                 WhisperForConditionalGeneration, with input_features and labels
vit                                     ViTForImageClassification, with pixel_values and labels
architectures: ["BertForTokenClassification"]    that class, with a label for each token

Classes are those of transformers' auto classes: the one that a configuration names, else the first of `HEADS` that has
one for its type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..system.user_warning import warn_user

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

SOUND = 16_000  # samples of a second
TEXT = {"batch": 1, "seq": 512}
SPOKEN = {"batch": 1, "seq": 128}  # tokens of what half a minute says
SECONDS = {"batch": 1, "seq": 10 * SOUND}
WHOLE = {"batch": 1}
Inputs = Callable[[Any, int, int], dict[str, Tensor]]  # of a configuration, a number of samples and of tokens


@dataclass(frozen=True, eq=False)
class Head:
    """A task that models of transformers are trained for.

    Attributes:
        auto: the auto class that maps configurations to such models.
        inputs: the batch.
        usual: the sizes that a call depends on, with what they are if they are not given.
        only_named: a configuration has such a head only if it names its class.
        having: what a configuration must have.
        options: others of forward.
    """

    auto: str
    inputs: Inputs
    usual: Mapping[str, int] = field(default_factory=lambda: TEXT)
    only_named: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    having: str = "model_type"

    def class_of(self, config: PreTrainedConfig) -> type[nn.Module] | None:
        """Return the class for this type of configuration; None if there is none."""
        import transformers

        mapping = getattr(transformers, self.auto)._model_mapping
        is_there = type(config) in mapping and hasattr(config, self.having)
        found: type[nn.Module] | None = mapping[type(config)] if is_there else None
        return found

    def call(self, config: PreTrainedConfig, batch: int, seq: int) -> dict[str, Any]:
        """Return the keyword arguments of forward."""
        return {**self.inputs(config, batch, seq), **self.options}


def _ids(*sizes: int) -> Tensor:
    return torch.empty(sizes, dtype=torch.long, device="meta")


def _floats(*sizes: int) -> Tensor:
    return torch.empty(sizes, device="meta")


def _tokens(config: Any, batch: int, seq: int) -> dict[str, Tensor]:
    return {"input_ids": _ids(batch, seq), "labels": _ids(batch, seq)}


def _text(labels: Callable[[int, int], dict[str, Tensor]], config: Any, batch: int, seq: int) -> dict[str, Tensor]:
    return {"input_ids": _ids(batch, seq), **labels(batch, seq)}


def _pixels(config: Any, batch: int) -> Tensor:
    parts = [config, getattr(config, "vision_config", None)]
    size = _first(parts, "image_size", 224)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return _floats(batch, _first(parts, "num_channels", 3), height, width)


def _first(parts: Iterable[Any], name: str, usual: int) -> Any:
    """Return the attribute of the first part that has it."""
    return next((value for part in parts if (value := getattr(part, name, None))), usual)


def _image(config: Any, batch: int, _: int) -> dict[str, Tensor]:
    return {"pixel_values": _pixels(config, batch), "labels": _ids(batch)}


def _segments(config: Any, batch: int, _: int) -> dict[str, Tensor]:
    pixels = _pixels(config, batch)
    return {"pixel_values": pixels, "labels": _ids(batch, *pixels.shape[2:])}


def _features(config: Any, batch: int) -> Tensor:
    """Return a spectrogram: of Whisper its bands come first, of other models its times."""
    if positions := getattr(config, "max_source_positions", 0):
        bands = _first([config], "num_mel_bins", getattr(config, "input_feat_per_channel", 80))
        return _floats(batch, bands, 2 * positions) if config.model_type == "whisper" else _floats(batch, 3000, bands)
    return _floats(batch, getattr(config, "max_length", 1024), getattr(config, "num_mel_bins", 128))


def _speech(config: Any, batch: int, seq: int) -> dict[str, Tensor]:
    return {"input_features": _features(config, batch), "labels": _ids(batch, seq)}


def _sound(config: Any, batch: int, seq: int) -> dict[str, Tensor]:
    return {"input_values": _floats(batch, seq), "labels": _ids(batch)}


def _spectrum(config: Any, batch: int, _: int) -> dict[str, Tensor]:
    return {"input_values": _features(config, batch), "labels": _ids(batch)}


def _ends(batch: int, _: int) -> dict[str, Tensor]:
    return {"start_positions": _ids(batch), "end_positions": _ids(batch)}


def _class(batch: int, _: int) -> dict[str, Tensor]:
    return {"labels": _ids(batch)}


def _classes(batch: int, seq: int) -> dict[str, Tensor]:
    return {"labels": _ids(batch, seq)}


HEADS = (
    Head("AutoModelForSpeechSeq2Seq", _speech, SPOKEN, options={"use_cache": False}),
    Head("AutoModelForSeq2SeqLM", _tokens, options={"use_cache": False}),
    Head("AutoModelForAudioClassification", _sound, SECONDS, having="conv_stride"),
    Head("AutoModelForAudioClassification", _spectrum, WHOLE),
    Head("AutoModelForMaskedLM", _tokens),
    Head("AutoModelForCausalLM", _tokens, options={"use_cache": False}),
    Head("AutoModelForImageClassification", _image, WHOLE),
    Head("AutoModelForSemanticSegmentation", _segments, WHOLE, only_named=True),
    Head("AutoModelForSequenceClassification", partial(_text, _class), only_named=True),
    Head("AutoModelForTokenClassification", partial(_text, _classes), only_named=True),
    Head("AutoModelForQuestionAnswering", partial(_text, _ends), only_named=True),
)


def without_draws(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration of a model whose layers all run, however a number is drawn: that takes the most."""
    for name in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
        if getattr(config, name, 0):
            setattr(config, name, 0.0)
    if getattr(config, "is_encoder_decoder", False) and not hasattr(config, "decoder_start_token_id"):
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0  # of any value: no token has one
    return config


def head_of(config: PreTrainedConfig, name: str) -> Head:
    """Return the head of a configuration.

    Raises:
        ValueError: there is none whose batch is known.
    """
    found = {each: each.class_of(config) for each in HEADS}
    named = tuple(getattr(config, "architectures", None) or ())
    for head, kind in found.items():
        if kind is not None and kind.__name__ in named:
            return head
    decodes = getattr(config, "is_decoder", False)
    usual = [head for head, kind in found.items() if kind is not None and not head.only_named]
    usual = [head for head in usual if not (decodes and head.auto == "AutoModelForMaskedLM")]
    if not usual:
        raise ValueError(
            f"{name!r} is a {config.model_type}, for which no batch is known: write a factory that returns the model "
            "and its arguments, and give FILE:FACTORY"
        )
    if named:
        warn_user(
            f"{name} is the configuration of {' and '.join(named)}, and what is planned is "
            f"{found[usual[0]].__name__}: a factory, FILE:FACTORY, plans the other"  # type: ignore[union-attr]
        )
    return usual[0]
