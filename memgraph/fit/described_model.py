"""A model without bytes and its call, from a configuration of Hugging Face's.

config_model("llama", ...)              the stock configuration of a type of model: 6.7B parameters
config_model("my/config.json", ...)     a folder, or a file; also of diffusers
config_model("Qwen/Qwen3-8B", ...)      a name of the hub: in the local cache, or over the network

Parameters are on device "meta": nothing is downloaded but the configuration, and nothing is allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..guards.module_proxy import WithLoss
from . import denoisers
from .heads import TEXT, WHOLE, Head, head_of, without_draws

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
        sizes: those on which the call depends, of "batch" and "seq", with what they are if they are not given.
    """

    call: Callable[[int, int], ModelCall]
    title: str
    longest: int | None = None
    sizes: Mapping[str, int] = field(default_factory=lambda: TEXT)


def config_model(
    name: str, dtype: torch.dtype, optimizer: str, lora: int | None = None, attention: str | None = None
) -> DescribedModel:
    """Return the model of a configuration with the batch that trains it.

    Args:
        name: a folder, a file, a type of model, or a name of the hub; a file or folder may be of diffusers.
        optimizer: "none", or a class of `torch.optim` in any case, with its own defaults.
        lora: the rank of adapters of PEFT at all linear layers, which alone are trained.
        attention: transformers' name of an implementation, as "sdpa" or "eager"; by default the model's own.

    Raises:
        ValueError: there is no such configuration, no batch is known for it, or there is no such optimizer.
    """
    config, head = denoisers.config_of(Path(name)), None
    if config is None:
        config = without_draws(_config(name))
        head = head_of(config, name)
        model, sizes, call = _made(config, head, dtype, name, attention), head.usual, partial(head.call, config)
    else:
        if attention is not None:
            raise ValueError(f"{name!r} is of diffusers, whose models choose their attention by themselves")
        model, sizes = nn.Module.to(denoisers.made(config, name), dtype).train(), WHOLE  # its own `to` logs advice
        call = partial(_denoised, model)
    title = f"{type(model).__name__} of {name}"
    if lora is not None:
        model, title = _with_adapters(model, lora), f"{title} with LoRA of rank {lora}"
    updates, loss = optimizer_of(model, optimizer), None if head else denoisers.loss

    def called(batch: int, seq: int) -> ModelCall:
        given = pytree.tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, call(batch, seq))
        return ModelCall(model, (), given, updates, loss)

    longest = next((getattr(config, key) for key in POSITIONS if getattr(config, key, None)), None)
    return DescribedModel(called, title, longest, sizes)


def _denoised(model: nn.Module, batch: int, _: int) -> dict[str, Any]:
    return denoisers.inputs(model, batch)


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


def _made(config: PreTrainedConfig, head: Head, dtype: torch.dtype, name: str, attention: str | None) -> nn.Module:
    """Return the model of a configuration, ready to train."""
    import transformers

    given = {} if attention is None else {"attn_implementation": attention}
    try:
        with torch.device("meta"):
            made: nn.Module = getattr(transformers, head.auto).from_config(config, dtype=dtype, **given)
    except ValueError as error:
        raise ValueError(f"transformers can't make {name!r}: {error}") from error
    return made.train()
