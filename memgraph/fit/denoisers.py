"""The model of a configuration of diffusers, and the batch that trains it.

UNet2DConditionModel, 4 samples    ->   sample (4, 4, 64, 64), timestep (4), encoder_hidden_states (4, 77, 768),
                                        and the noise (4, 4, 64, 64) that the loss compares with the result

Sizes are those of the configuration: `--seq` is not among them.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

FILE = "config.json"
CLASS = "_class_name"
SIZE = "sample_size"  # of what is denoised; others take tokens of an image that they did not make
IMAGES = "2D"  # in the names of classes; others make films
PROMPT = 77  # tokens of a text, by CLIP's encoder


def config_of(path: Path) -> dict[str, Any] | None:
    """Return the configuration in a file or a folder if it is one of diffusers'."""
    file = path / FILE if path.is_dir() else path
    try:
        read = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return read if isinstance(read, dict) and CLASS in read else None


def made(config: Mapping[str, Any], name: str) -> Any:
    """Return the model on device "meta".

    Raises:
        ValueError: there is no such model, or no batch is known for it.
    """
    try:
        import diffusers
    except ImportError as error:
        raise ValueError(f"{name!r} is read with diffusers: pip install diffusers") from error
    kind: Any = getattr(diffusers, config[CLASS], None)
    if kind is None:
        raise ValueError(f"{name!r} is a {config[CLASS]}, which diffusers {diffusers.__version__} does not have")
    taken = inspect.signature(kind.forward).parameters
    needed = {name for name, each in taken.items() if each.default is inspect.Parameter.empty} - {"self"}
    if needed - INPUTS.keys() or SIZE not in inspect.signature(kind).parameters or IMAGES not in kind.__name__:
        raise ValueError(
            f"{name!r} is a {config[CLASS]}, for which no batch is known: write a factory that returns the model and "
            "its arguments, and give FILE:FACTORY"
        )
    with torch.device("meta"):
        return kind.from_config(dict(config))


def inputs(model: Any, batch: int) -> dict[str, Tensor | dict[str, Tensor]]:
    """Return the keyword arguments of forward, and the noise as `target`."""
    known = [name for name in inspect.signature(model.forward).parameters if name in INPUTS]
    given = {name: value for name in known if (value := INPUTS[name](model.config, batch)) is not None}
    return {**given, "target": torch.empty_like(given["sample" if "sample" in given else "hidden_states"])}


def loss(result: Any, target: Tensor) -> Tensor:
    """Return how far the noise that was found is from the noise that is there."""
    return nn.functional.mse_loss(result.sample[:, : target.shape[1]].float(), target.float())


def _floats(*sizes: int) -> Tensor:
    return torch.empty(sizes, device="meta")


def _noisy(config: Any, batch: int) -> Tensor:
    size = config.sample_size or 64
    height, width = (size, size) if isinstance(size, int) else size
    return _floats(batch, config.in_channels, height, width)


def _prompt(config: Any, batch: int) -> Tensor | None:
    width = config.get("caption_channels") or config.get("joint_attention_dim") or config.get("cross_attention_dim")
    return None if width is None else _floats(batch, PROMPT, width if isinstance(width, int) else width[0])


def _pooled(config: Any, batch: int) -> Tensor | None:
    return _floats(batch, config.pooled_projection_dim) if config.get("pooled_projection_dim") else None


def _class(config: Any, batch: int) -> Tensor | None:
    counted = config.get("num_class_embeds") or config.get("norm_type") == "ada_norm_zero"
    return torch.empty(batch, dtype=torch.long, device="meta") if counted else None


def _added(config: Any, batch: int) -> dict[str, Tensor] | None:
    """Return what is said of the image: by Stable Diffusion XL its pooled text and six sizes, by PixArt its shape."""
    if config.get("norm_type") == "ada_norm_single":
        return {"resolution": _floats(batch, 2), "aspect_ratio": _floats(batch, 1)}
    if config.get("addition_embed_type") != "text_time":
        return None
    width = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
    return {"text_embeds": _floats(batch, width), "time_ids": _floats(batch, 6)}


def _time(config: Any, batch: int) -> Tensor:
    return torch.empty(batch, dtype=torch.long, device="meta")


INPUTS: Mapping[str, Callable[[Any, int], Any]] = {  # by the name of forward's parameter
    "sample": _noisy,
    "hidden_states": _noisy,
    "timestep": _time,
    "encoder_hidden_states": _prompt,
    "pooled_projections": _pooled,
    "class_labels": _class,
    "added_cond_kwargs": _added,
}
