"""A model without bytes and its call, from a configuration of Hugging Face's.

config_model("llama", ...)              the stock configuration of a type of model: 6.7B parameters
config_model("my/config.json", ...)     a folder, or a file
config_model("Qwen/Qwen3-8B", ...)      a name of the hub: in the local cache, or over the network

Parameters are on device "meta": nothing is downloaded but the configuration, and nothing is allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..guards.module_proxy import WithLoss
from ..system.user_warning import warn_user

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

POSITIONS = ("max_position_embeddings", "n_positions")


@dataclass(frozen=True, eq=False)
class ModelCall:
    """A module, and the arguments that it is called with; tensors of device "meta" have no bytes."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    optimizer: torch.optim.Optimizer | None = None
    loss: Callable[..., Any] | None = None

    @property
    def module(self) -> nn.Module:
        """Return the module that returns the loss, if there is one."""
        return self.model if self.loss is None else WithLoss(self.model, self.loss)

    @property
    def options(self) -> dict[str, Any]:
        """Return keyword arguments for `memgraph.plan` and `memgraph.sweep`."""
        return {**self.kwargs, "optimizer": self.optimizer, "loss": self.loss}


@dataclass(frozen=True, eq=False)
class DescribedModel:
    """A model whose call can have any size.

    Attributes:
        call: makes the call for a number of samples and a number of tokens.
        title: what to call it.
        longest: the most tokens that it takes; None if its configuration does not say.
        sizes: those on which the call depends, of "batch" and "seq".
    """

    call: Callable[[int, int], ModelCall]
    title: str
    longest: int | None = None
    sizes: tuple[str, ...] = ("batch", "seq")


def config_model(name: str, dtype: torch.dtype, optimizer: str, lora: int | None = None) -> DescribedModel:
    """Return the causal language model of a configuration, called with labels.

    Args:
        name: a folder, a file, a type of model, or a name of the hub.
        optimizer: "none", or a class of `torch.optim` in any case, with its own defaults.
        lora: the rank of adapters of PEFT at all linear layers, which alone are trained.

    Raises:
        ValueError: there is no such configuration, it has no causal language model, or there is no such optimizer.
    """
    config = _config(name)
    model = _made(config, dtype, name)
    if lora is not None:
        model = _with_adapters(model, lora)
    updates = optimizer_of(model, optimizer)

    def call(batch: int, seq: int) -> ModelCall:
        ids = torch.empty(batch, seq, dtype=torch.long, device="meta")
        return ModelCall(model, (), {"input_ids": ids, "labels": ids, "use_cache": False}, updates)

    longest = next((getattr(config, key) for key in POSITIONS if getattr(config, key, None)), None)
    base: Any = model
    made = type(base if lora is None else base.get_base_model()).__name__
    return DescribedModel(call, f"{made} of {name}" + f" with LoRA of rank {lora}" * (lora is not None), longest)


def optimizer_of(model: nn.Module, name: str) -> torch.optim.Optimizer | None:
    """Return an optimizer of this name; None for "none".

    Raises:
        ValueError: there is no such class, or it can't have these parameters.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if name == "none" or not trained:
        return None
    classes = {
        each.__name__.lower(): each
        for each in vars(torch.optim).values()
        if isinstance(each, type) and issubclass(each, torch.optim.Optimizer) and each is not torch.optim.Optimizer
    }
    kind: Any = classes.get(name.lower())
    if kind is None:
        near = ", ".join(sorted(each.__name__ for each in classes.values()))
        raise ValueError(f"there is no optimizer {name!r} in torch.optim: give none, or one of {near}")
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    try:
        made: torch.optim.Optimizer = kind(trained, lr=1e-3, **options)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{kind.__name__} can't update all parameters of this model ({error}): write a factory that returns the "
            "model and its optimizer, and give FILE:FACTORY"
        ) from error
    return made


def _with_adapters(model: nn.Module, rank: int) -> nn.Module:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ValueError("adapters are those of PEFT: pip install peft") from error
    adapters = LoraConfig(r=rank, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    with torch.device("meta"):
        made: nn.Module = get_peft_model(model, adapters)
    return made


def _config(name: str) -> PreTrainedConfig:
    try:
        from transformers import CONFIG_MAPPING, AutoConfig
    except ImportError as error:
        raise ValueError(f"{name!r} is read with transformers: pip install transformers") from error
    path = Path(name)
    if not path.exists() and _is_path(name):
        raise ValueError(f"there is no file or folder {name!r} in {Path.cwd()}")
    try:
        if path.exists():
            return AutoConfig.from_pretrained(str(path))
        if name in CONFIG_MAPPING:
            return AutoConfig.for_model(name)
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if path.exists():
            raise ValueError(f"{name!r} holds no configuration of a model: {reason}") from error
        raise ValueError(
            f"there is no configuration {name!r}: it is no folder or file here, no type of model that transformers "
            f"knows (as llama or gpt2), and neither the local cache nor the network has it ({reason}). Download its "
            "config.json alone, and give that file"
        ) from error


def _is_path(name: str) -> bool:
    """Return True if a name can't be one of the hub's, which are NAME or OWNER/NAME."""
    return name.endswith(".json") or name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith("/")


def _made(config: PreTrainedConfig, dtype: torch.dtype, name: str) -> nn.Module:
    """Return the model of a configuration, ready to train.

    Raises:
        ValueError: it has no causal language model.
    """
    import transformers

    names = list(getattr(config, "architectures", None) or ())
    known = [getattr(transformers, each, None) for each in names]
    named = next((each for each in known if each is not None and "CausalLM" in each.__name__), None)
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"{name!r} is a {config.model_type}, an encoder with a decoder, which is called with the inputs of both; "
            "write a factory that returns the model and its arguments, and give FILE:FACTORY"
        )
    try:
        with torch.device("meta"):
            if named is not None:
                made: nn.Module = named(config).to(dtype)
            else:
                made = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):
            raise
        raise ValueError(
            f"{name!r} is a {config.model_type}, which has no causal language model; write a factory that returns the "
            "model and its arguments, and give FILE:FACTORY"
        ) from None
    if names and type(made).__name__ not in names:
        warn_user(
            f"{name} is the configuration of {' and '.join(names)}, and what is planned is {type(made).__name__}, "
            "called with labels: a factory, FILE:FACTORY, plans the other"
        )
    return made.train()
