"""The ops that slices add.

scale_(x, factor)                     x is multiplied in place, unless the factor is 1
lookup_(out, rows, indices, 64, 256)  the rows of `out` whose index is of these rows, from the 64th of 256 on
indices_within(indices, 64, 32, -1)   indices within 32 rows from the 64th on; -1 for others, and for padding
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..graph.define_op import define_op

_library = torch.library.Library("memgraph_slices", "DEF")


def _scale(x: Tensor, factor: Tensor) -> Tensor:
    # On a GPU the host would wait for the factor.
    return x if factor.device.type == "cpu" and factor.item() == 1.0 else x.mul_(factor)


def _lookup(out: Tensor, rows: Tensor, indices: Tensor, first: int, count: int) -> Tensor:
    if first == 0:
        _check_indices(indices, count)
    places = indices - first
    is_here = ((places >= 0) & (places < rows.shape[0])).unsqueeze(-1)
    found = torch.nn.functional.embedding(places.clamp_(0, rows.shape[0] - 1), rows)
    return torch.where(is_here, found, out, out=out)


def _check_indices(indices: Tensor, count: int) -> None:
    """Refuse what `embedding` refuses; a GPU does so when it gets there, as `embedding` does."""
    is_known = ((indices >= 0) & (indices < count)).all()
    if indices.device.type != "cpu":
        torch._assert_async(is_known, "index out of range in self")
    elif not is_known:
        raise IndexError("index out of range in self")


def _indices_within(indices: Tensor, first: int, rows: int, padding: int) -> Tensor:
    places = indices - first
    is_out = (places < 0) | (places >= rows) | (indices == padding)
    return places.masked_fill_(is_out, -1)


def _first(x: Tensor, *_: object) -> Tensor:
    return x


def _like(indices: Tensor, *_: object) -> Tensor:
    return torch.empty_like(indices, memory_format=torch.contiguous_format)


SCALE = define_op(_library, "scale_(Tensor(a!) x, Tensor factor) -> Tensor(a!)", _scale, _first)
LOOK_UP = define_op(
    _library, "lookup_(Tensor(a!) out, Tensor rows, Tensor indices, int first, int count) -> Tensor(a!)",
    _lookup, _first,
)  # fmt: skip
INDICES_WITHIN = define_op(
    _library, "indices_within(Tensor indices, int first, int rows, int padding) -> Tensor", _indices_within, _like
)
