"""Flat tensors as one, and one as several; cast for their way, if that is asked for.

joined([w[4:7], b])   ->  a copy of 4 elements; w[4:7] itself, if it is alone
split(whole, [3, 1])  ->  whole[0:3], whole[3:4]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...storage.wire_cast import narrow


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """All their elements, one tensor behind the other; not copied, if it is one that lies in one stretch."""
    if len(tensors) == 1 and tensors[0].is_contiguous():
        return tensors[0].view(-1)
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def split(whole: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """Views of so many elements each, one behind the other."""
    return list(whole.split(list(counts))) if counts else []


def put(whole: Tensor, views: Sequence[Tensor]) -> None:
    """Copy the elements of one tensor into several."""
    parts = split(whole, [view.numel() for view in views])
    torch._foreach_copy_(list(views), [part.view(view.shape) for part, view in zip(parts, views, strict=True)])


def narrowed(tensor: Tensor, wire: torch.dtype | None) -> Tensor:
    """What is sent of it: itself, unless it is float32 and to be rounded."""
    return tensor if wire is None or tensor.dtype != torch.float32 else narrow(tensor, wire)


def wire_type(dtype: torch.dtype, wire: torch.dtype | None) -> torch.dtype:
    """In what elements of a type are sent."""
    return dtype if wire is None or dtype != torch.float32 else wire
