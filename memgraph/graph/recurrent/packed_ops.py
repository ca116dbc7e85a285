"""Ops that pack rows of several lengths and pad them again, with sizes that are known before they run.

    pack(x[T, B, ...], batch_sizes=[3, 3, 1])       ->   data[7, ...]
    pad(data[7, ...], batch_sizes=[3, 3, 1])        ->   x[3, 3, ...], zeros where a row has ended

`batch_sizes` says how many rows are longer than 0, 1, ... steps. Each op is the other's backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..define_op import define_op
from ..nodes import aten


def batch_sizes_of(lengths: Sequence[int]) -> list[int]:
    """Return how many rows are longer than 0, 1, ... steps."""
    return [sum(length > step for length in lengths) for step in range(max(lengths, default=0))]


def lengths_of(batch_sizes: Sequence[int]) -> list[int]:
    """Return the lengths of rows, the longest first."""
    return [sum(size > row for size in batch_sizes) for row in range(batch_sizes[0])]


def _pack(input: Tensor, batch_sizes: list[int], batch_first: bool) -> Tensor:
    return aten._pack_padded_sequence.default(input, torch.tensor(lengths_of(batch_sizes)), batch_first)[0]


def _fake_pack(input: Tensor, batch_sizes: list[int], batch_first: bool) -> Tensor:
    return input.new_empty(sum(batch_sizes), *input.shape[2:])


def _pad(data: Tensor, batch_sizes: list[int], batch_first: bool, value: float, total_length: int) -> Tensor:
    sizes = torch.tensor(batch_sizes)
    padded: Tensor = aten._pad_packed_sequence.default(data, sizes, batch_first, value, total_length)[0]
    return padded


def _fake_pad(data: Tensor, batch_sizes: list[int], batch_first: bool, value: float, total_length: int) -> Tensor:
    padded = data.new_empty(max(total_length, len(batch_sizes)), batch_sizes[0], *data.shape[1:])
    return padded.transpose(0, 1) if batch_first else padded


def _save_pack(ctx: Any, inputs: Any, output: Tensor) -> None:
    input, ctx.batch_sizes, ctx.batch_first = inputs
    ctx.total_length = input.shape[1 if ctx.batch_first else 0]


def _pack_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return PAD(gradient, ctx.batch_sizes, ctx.batch_first, 0.0, ctx.total_length), None, None


def _save_pad(ctx: Any, inputs: Any, output: Tensor) -> None:
    _, ctx.batch_sizes, ctx.batch_first, _, _ = inputs


def _pad_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
    return PACK(gradient, ctx.batch_sizes, ctx.batch_first), None, None, None, None


_library = torch.library.Library("memgraph_packed", "DEF")
PACK = define_op(_library, "pack(Tensor input, int[] batch_sizes, bool batch_first) -> Tensor", _pack, _fake_pack)
PAD = define_op(
    _library, "pad(Tensor data, int[] batch_sizes, bool batch_first, Scalar value, int total_length) -> Tensor",
    _pad, _fake_pad,
)  # fmt: skip
torch.library.register_autograd("memgraph_packed::pack", _pack_backward, setup_context=_save_pack, lib=_library)
torch.library.register_autograd("memgraph_packed::pad", _pad_backward, setup_context=_save_pad, lib=_library)
