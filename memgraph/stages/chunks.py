"""A mini-batch in micro-batches.

    (x: 8 rows, mask: 8 rows, scale: 3 rows), 3 micro-batches
    ->   (x[:3], mask[:3], scale), (x[3:6], mask[3:6], scale), (x[6:], mask[6:], scale)

Tensors with as many rows as the first one are divided as `torch.chunk` does, others are given to each micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..oss.comm.agreement import checksum
from ..tensors.pytree import flatten, unflatten


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """The arguments of one call; `share` of the mini-batch's rows."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    share: float

    @property
    def shapes(self) -> tuple[torch.Size, ...]:
        """Return the shapes of its tensors, in which the micro-batches of a mini-batch may differ."""
        leaves, _ = flatten((self.args, self.kwargs))
        return tuple(leaf.shape for leaf in leaves if isinstance(leaf, Tensor))


def chunked(args: tuple[Any, ...], kwargs: dict[str, Any], chunks: int) -> list[MicroBatch]:
    """Return at most `chunks` micro-batches; their tensors are views of the given ones.

    All but the last have the same number of rows, and there are as many as `torch.chunk` makes.

    Raises:
        ValueError: no tensor has rows.
    """
    leaves, spec = flatten((args, kwargs))
    rows = next((leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()), 0)
    if rows == 0:
        raise ValueError(f"a mini-batch without rows can't be divided into chunks={chunks} micro-batches")
    sizes = [len(part) for part in torch.empty(rows, 0, device="meta").chunk(chunks)]
    divided = [
        leaf.chunk(chunks) if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == rows else [leaf] * len(sizes)
        for leaf in leaves
    ]
    calls = [unflatten(list(each), spec) for each in zip(*divided, strict=True)]
    return [MicroBatch(args, kwargs, size / rows) for (args, kwargs), size in zip(calls, sizes, strict=True)]


def call_lines(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Describe a call in lines: its kind, and the values of its tensors."""
    leaves, spec = flatten((args, kwargs))
    kind, values = [f"the structure of the call: {spec.tree}"], []
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            kind.append(f"tensor {place} of the batch: {leaf.dtype}{list(leaf.shape)}")
            values.append(f"the values of tensor {place} of the batch: checksum {checksum(leaf):08x}")
        else:
            kind.append(f"argument {place}: {leaf!r}")
    return kind, values


def mode_lines(module: torch.nn.Module) -> Iterator[str]:
    """Describe in lines what a capture of the module depends on besides the call."""
    modes = "".join(str(int(each.training)) for each in module.modules())
    frozen = "".join(str(int(parameter.requires_grad)) for parameter in module.parameters())
    yield f"training mode of the modules: {modes}"
    yield f"parameters that require gradients: {frozen}"
    yield f"autocast: {torch.is_autocast_enabled('cpu')}"


def batch_nbytes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the bytes of a call's tensors."""
    leaves, _ = flatten((args, kwargs))
    return sum(leaf.untyped_storage().nbytes() for leaf in leaves if isinstance(leaf, Tensor))
