"""Tensors without bytes as the arguments of a call that is only planned.

plan(model, torch.empty(64, 4096, device="meta"))   ->   planned for a tensor of that shape on the model's device

The longest batch of a data set can be planned before any of it is loaded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..capture.constant_fake_mode import ConstantFakeMode


def on_device(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], microbatches: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with each tensor of device "meta" as a fake one on the module's device.

    Raises:
        ValueError: there is one, and `microbatches` needs the values of the batch.
    """
    device = next((tensor.device for tensor in (*module.parameters(), *module.buffers())), torch.device("cpu"))
    if device.type == "meta" or not any(map(_is_meta, pytree.tree_leaves((args, kwargs)))):
        return args, kwargs
    if microbatches > 1:
        raise ValueError(
            "an argument is on the device meta, and microbatches= runs forward on some rows to check that they are "
            "independent: give a batch with values, torch.zeros of its shape say"
        )
    return fake_arguments(args, kwargs, device)


def fake_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with each tensor of device "meta" as a fake one on `device`."""
    mode, known = ConstantFakeMode(), dict[int, Tensor]()

    def fake(leaf: Any) -> Any:
        if not _is_meta(leaf):
            return leaf
        if id(leaf) not in known:  # an argument that is given twice stays one
            with mode:
                empty = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=device)
            known[id(leaf)] = empty.requires_grad_(leaf.requires_grad)
        return known[id(leaf)]

    moved: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(fake, (args, kwargs))
    return moved


def _is_meta(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.device.type == "meta"
