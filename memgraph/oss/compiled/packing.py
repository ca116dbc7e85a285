"""What lays out gradients for an exchange in a graph, as torch ops whose time and workspace can be measured.

t = memgraph_oss::piece(dw, 96, 100)           a copy of its end, so that the rest of it may go
p = memgraph_oss::pack([t, db], [0, 4], 8)     one behind the other, with zeros where nothing lies
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...graph.ops import stretch

_library = torch.library.Library("memgraph_oss", "DEF")
_library.define("piece(Tensor x, int begin, int end) -> Tensor")
_library.define("pack(Tensor[] parts, int[] begins, int size) -> Tensor")


def piece(x: Tensor, begin: int, end: int) -> Tensor:
    """A copy of a stretch of a gradient."""
    return stretch(x, begin, end).clone()


def pack(parts: Sequence[Tensor], begins: Sequence[int], size: int) -> Tensor:
    """Gradients one behind the other, each from its place on, with zeros between them."""
    packed, end = parts[0].new_empty(size), 0
    for part, begin in zip(parts, begins, strict=True):
        packed[end:begin].zero_()
        end = begin + part.numel()
        packed[begin:end].copy_(stretch(part, 0, part.numel()))
    packed[end:].zero_()
    return packed


def _fake_pack(parts: Sequence[Tensor], begins: Sequence[int], size: int) -> Tensor:
    return parts[0].new_empty(size)


for _name, _run, _fake in (("piece", piece, piece), ("pack", pack, _fake_pack)):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"memgraph_oss::{_name}", _fake, lib=_library)

PACKING = torch.ops.memgraph_oss
