"""Generate inputs on which an op whose sizes depend on values makes results of given sizes.

memgraph_guards::nonzero(f32[100], sizes=[2, 7, 1])   ->   seven ones, and zeros
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from ..graph.guard_ops import SIZED
from ..graph.nodes import aten


def fill_for_sizes(op: object, args: Any, kwargs: Mapping[str, Any]) -> None:
    """Change the arguments of an op in place, so that its results have the sizes in `kwargs`."""
    fill = FILLERS.get(op)
    if fill is not None:
        fill(kwargs["sizes"], *args)


def _nonzero(sizes: list[int], x: Tensor) -> None:
    x.copy_(_first(x.numel(), sizes[1]).view(x.shape))


def _masked_select(sizes: list[int], x: Tensor, mask: Tensor) -> None:
    repeats = torch.broadcast_shapes(x.shape, mask.shape).numel() // max(mask.numel(), 1)
    mask.copy_(_first(mask.numel(), sizes[1] // max(repeats, 1)).view(mask.shape))


def _unique(sizes: list[int], x: Tensor, *rest: object) -> None:
    x.copy_((torch.arange(x.numel()) % max(sizes[1], 1)).view(x.shape))


def _unique_dim(sizes: list[int], x: Tensor, dim: int, *rest: object) -> None:
    count = sizes[1 + dim % x.dim()]
    x.copy_(_along(torch.arange(x.shape[dim]) * count // max(x.shape[dim], 1), x, dim))


def _unique_consecutive(
    sizes: list[int], x: Tensor, inverse: bool = False, counts: bool = False, dim: int | None = None
) -> None:
    length = x.numel() if dim is None else x.shape[dim]
    runs = torch.arange(length) * sizes[1 if dim is None else 1 + dim % x.dim()] // max(length, 1)
    x.copy_(runs.view(x.shape) if dim is None else _along(runs, x, dim))


def _largest_first(sizes: list[int], x: Tensor, *rest: object) -> None:
    """Let the first number be the size."""
    x.zero_()
    x[:1] = sizes[1]


def _bincount(sizes: list[int], x: Tensor, *rest: object) -> None:
    x.zero_()
    x[:1] = max(sizes[1] - 1, 0)


def _first(length: int, count: int) -> Tensor:
    return torch.arange(length) < count


def _along(values: Tensor, like: Tensor, dim: int) -> Tensor:
    return values.view([-1 if i == dim % like.dim() else 1 for i in range(like.dim())]).expand(like.shape)


_FILLERS: tuple[tuple[OpOverload, Callable[..., None]], ...] = (
    (aten.nonzero.default, _nonzero),
    (aten.masked_select.default, _masked_select),
    (aten._unique.default, _unique),
    (aten._unique2.default, _unique),
    (aten.unique_dim_consecutive.default, _unique_dim),
    (aten.unique_dim.default, _unique_dim),
    (aten.unique_consecutive.default, _unique_consecutive),
    (aten.repeat_interleave.Tensor, _largest_first),
    (aten.bincount.default, _bincount),
)
FILLERS: Mapping[object, Callable[..., None]] = {SIZED[op]: fill for op, fill in _FILLERS}
