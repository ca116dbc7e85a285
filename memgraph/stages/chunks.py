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
        ValueError: no tensor has rows, or one is the result of an op that autograd has to differentiate.
    """
    leaves, spec = flatten((args, kwargs))
    rows = next((leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()), 0)
    if any(isinstance(leaf, Tensor) and leaf.grad_fn is not None for leaf in leaves):
        raise ValueError(
            "a tensor of the mini-batch is the result of an op that has to be differentiated; give x.detach(), with "
            "requires_grad_() for its gradient, and go on backward from its .grad"
        )
    if rows == 0:
        raise ValueError(f"a mini-batch without rows can't be divided into chunks={chunks} micro-batches")
    sizes = [len(part) for part in torch.empty(rows, 0, device="meta").chunk(chunks)]
    tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
    parts = {
        key: _parts(leaf, chunks) if leaf.dim() and leaf.shape[0] == rows else [leaf] * len(sizes)
        for key, leaf in tensors.items()
    }
    divided = [parts[id(leaf)] if isinstance(leaf, Tensor) else [leaf] * len(sizes) for leaf in leaves]
    calls = [unflatten(list(each), spec) for each in zip(*divided, strict=True)]
    return [MicroBatch(args, kwargs, size / rows) for (args, kwargs), size in zip(calls, sizes, strict=True)]


def _parts(leaf: Tensor, chunks: int) -> list[Tensor]:
    """Return a tensor in parts. Their gradients are those parts of its gradient."""
    parts = [part.requires_grad_(leaf.requires_grad) for part in leaf.detach().chunk(chunks)]
    if leaf.grad is not None:
        for part, gradient in zip(parts, leaf.grad.chunk(chunks), strict=True):
            part.grad = gradient
    return parts


def call_lines(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Describe a call in lines: its kind, and the values of its tensors."""
    leaves, spec = flatten((args, kwargs))
    kind, values = [f"the structure of the call: {spec.tree}"], []
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            kind.append(f"tensor {place} of the batch: {leaf.dtype}{list(leaf.shape)}, gradient: {leaf.requires_grad}")
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
    """Return the bytes of a call's tensors, and of their gradients."""
    leaves, _ = flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    gradients = sum(leaf.nbytes for leaf in tensors if leaf.requires_grad)
    return gradients + sum(leaf.untyped_storage().nbytes() for leaf in tensors)
