"""A model without bytes, from a configuration of Hugging Face's.

described_model("llama")              the stock configuration of a model type: 6.7B parameters
described_model("my/config.json")     a folder, or a file
described_model("Qwen/Qwen3-8B")      a name of the hub: in the local cache, or over the network

Its parameters are on device "meta": nothing is downloaded but the configuration, and nothing is allocated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
POSITIONS = ("max_position_embeddings", "n_positions")


@dataclass(frozen=True, eq=False)
class DescribedModel:
    """A model of device "meta", and its calls.

    Attributes:
        arguments: positional and keyword arguments for a number of samples and tokens.
        optimizer: counted with the step.
        longest: the most tokens that it takes; None if its configuration does not say.
        title: what to call it.
    """

    model: nn.Module
    arguments: Callable[[int, int], Arguments]
    title: str
    optimizer: torch.optim.Optimizer | None = None
    longest: int | None = None

    @property
    def numel(self) -> int:
        """The number of its parameters."""
        return sum(parameter.numel() for parameter in self.model.parameters())


def described_model(name: str, dtype: torch.dtype, optimizer: str) -> DescribedModel:
    """Return the causal language model of a configuration, called with labels.

    Args:
        name: a folder, a file, a type of model, or a name of the hub.
        optimizer: "adamw", "sgd" or "none".

    Raises:
        ValueError: there is no such configuration, or it has no causal language model.
    """
    config = _config(name)
    model = _made(config, dtype, name)
    longest = next((getattr(config, key) for key in POSITIONS if getattr(config, key, None)), None)
    title = f"{type(model).__name__} of {name}"
    return DescribedModel(model, _labelled, title, optimizer_of(model, optimizer), longest)


def optimizer_of(model: nn.Module, name: str) -> torch.optim.Optimizer | None:
    """Return an optimizer of this name; None for "none"."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if name == "none" or not trained:
        return None
    return torch.optim.AdamW(trained) if name == "adamw" else torch.optim.SGD(trained, lr=1e-3, momentum=0.9)


def _labelled(batch: int, seq: int) -> Arguments:
    ids = torch.empty(batch, seq, dtype=torch.long, device="meta")
    return (), {"input_ids": ids, "labels": ids, "use_cache": False}


def _config(name: str) -> PreTrainedConfig:
    try:
        from transformers import CONFIG_MAPPING, AutoConfig
    except ImportError as error:
        raise ValueError(f"{name!r} is read with transformers: pip install transformers") from error
    path = Path(name)
    try:
        if path.exists():
            return AutoConfig.from_pretrained(str(path))
        if name in CONFIG_MAPPING:
            return AutoConfig.for_model(name)
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"there is no configuration {name!r}: it is no folder or file here, no type of model that transformers "
            f"knows (as llama, gpt2), and neither the local cache nor the network has it ({first}). Download its "
            "config.json alone, and give that file"
        ) from error


def _made(config: PreTrainedConfig, dtype: torch.dtype, name: str) -> nn.Module:
    """Return the model of a configuration, ready to train.

    Raises:
        ValueError: it is no causal language model, or can't be built without weights.
    """
    import transformers

    known = [getattr(transformers, each, None) for each in config.architectures or ()]
    named = next((each for each in known if each is not None and "CausalLM" in each.__name__), None)
    try:
        with torch.device("meta"):
            if named is not None:
                made: nn.Module = named._from_config(config, dtype=dtype)
            else:
                made = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):
            raise
        raise ValueError(
            f"{name!r} is a {config.model_type}, which has no causal language model; write a factory that returns the "
            "model and its arguments, and give FILE:FACTORY"
        ) from None
    return made.train()
