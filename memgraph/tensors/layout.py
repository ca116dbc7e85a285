"""Dense tensors, whose elements fill one range of memory, and views of such ranges.

is_dense(w.t())                   ->  True: in another order, without gaps
flat(f32[3, 4])                   ->  f32[12], the elements in memory order
view_bytes_as(u8[48], w)          ->  f32[3, 4], a view of the bytes
alias_storage_as(f32[12], w)      ->  f32[3, 4] over the same storage, an independent tensor
without_base([a view])            ->  the same bytes, as a tensor that may be changed in place
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


def is_dense(tensor: Tensor) -> bool:
    """Return True if the elements fill one range of memory, without overlaps."""
    return tensor.layout == torch.strided and bool(torch.ops.aten.is_non_overlapping_and_dense.default(tensor))


def flat(tensor: Tensor) -> Tensor:
    """Return the elements of a dense tensor in memory order.

    Raises:
        ValueError: it has gaps or overlaps.
    """
    if not is_dense(tensor):
        raise ValueError(
            f"a tensor with shape {tuple(tensor.shape)} and strides {tensor.stride()} has gaps or overlaps"
        )
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def view_bytes_as(run: Tensor, like: Tensor) -> Tensor:
    """View bytes as a tensor of this dtype, shape and strides."""
    return run.view(like.dtype).as_strided(like.shape, like.stride())


def has_layout(tensor: Tensor, like: Tensor) -> bool:
    """Return True if two tensors have the same dtype, shape and strides."""
    return tensor.shape == like.shape and tensor.stride() == like.stride() and tensor.dtype == like.dtype


def alias_storage_as(of: Tensor, like: Tensor) -> Tensor:
    """Return the storage of a tensor, from its start, with the layout of `like`."""
    empty = torch.empty(0, dtype=like.dtype, device=of.device)
    return empty.set_(of.untyped_storage(), 0, like.shape, like.stride())


def without_base(values: Sequence[Any], others: Iterable[Tensor]) -> list[Any]:
    """Return the values; a view whose storage neither another of them nor one of `others` has is no view any more.

    Autograd refuses to change a view in place that a function of its own returns, which eager does not.
    """
    found = (each for each in (*values, *others) if isinstance(each, Tensor) and has_storage(each))
    counts = Counter(tensor.untyped_storage()._cdata for tensor in found)
    return [
        torch.empty(0, dtype=each.dtype, device=each.device).set_(
            each.untyped_storage(), each.storage_offset(), each.shape, each.stride()
        )
        if _is_plain_view(each) and counts[each.untyped_storage()._cdata] == 1
        else each
        for each in values
    ]


def _is_plain_view(tensor: Any) -> bool:
    return type(tensor) is Tensor and tensor._is_view() and not tensor.is_conj() and not tensor.is_neg()


def has_storage(tensor: Tensor) -> bool:
    """Return True if the tensor is strided and not nested."""
    return tensor.layout == torch.strided and not tensor.is_nested
