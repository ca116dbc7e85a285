"""Tensors whose elements fill one run of memory, each its own part of it; and such runs, seen as tensors.

is_dense(w.t())         ->  True: in another order, without gaps
flat(f32[3, 4])         ->  f32[12], the elements as they lie in memory
shaped(u8[48], w)       ->  f32[3, 4], a view of the bytes
laid(f32[12], w)        ->  f32[3, 4] over the same storage, a tensor of its own
"""

from __future__ import annotations

import torch
from torch import Tensor


def is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill one run of memory, each its own part of it."""
    return tensor.layout == torch.strided and bool(torch.ops.aten.is_non_overlapping_and_dense.default(tensor))


def flat(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor as they lie in memory.

    Raises:
        ValueError: it has gaps or overlaps.
    """
    if not is_dense(tensor):
        raise ValueError(
            f"a tensor with shape {tuple(tensor.shape)} and strides {tensor.stride()} has gaps or overlaps"
        )
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def view_bytes_as(run: Tensor, like: Tensor) -> Tensor:
    """A run of bytes, seen as a tensor of this type, shape and strides."""
    return run.view(like.dtype).as_strided(like.shape, like.stride())


def alias_storage_as(of: Tensor, like: Tensor) -> Tensor:
    """The storage of a tensor, from its begin on, laid out as `like`."""
    empty = torch.empty(0, dtype=like.dtype, device=of.device)
    return empty.set_(of.untyped_storage(), 0, like.shape, like.stride())


def has_storage(tensor: Tensor) -> bool:
    """Whether it is one stretch of memory, and not several tensors."""
    return tensor.layout == torch.strided and not tensor.is_nested
