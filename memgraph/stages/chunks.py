"""A mini-batch in micro-batches.

    (x: 8 rows, mask: 8 rows, scale: replicated), 3 micro-batches
    ->   (x[:3], mask[:3], scale), (x[3:6], mask[3:6], scale), (x[6:], mask[6:], scale)

Tensors are divided as `torch.chunk` does. Each micro-batch is given numbers, tensors of one row and replicated ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
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


def chunked(
    args: tuple[Any, ...], kwargs: dict[str, Any], chunks: int, replicated: Collection[str | int] = ()
) -> list[MicroBatch]:
    """Return at most `chunks` micro-batches; their tensors are views of the given ones.

    All but the last have the same number of rows, and there are as many as `torch.chunk` makes.

    Args:
        replicated: names, or positions, of arguments that each micro-batch gets whole.

    Raises:
        ValueError: tensors have no rows, or not the same number of them, or one has to be differentiated.
    """
    leaves, spec = flatten((args, kwargs))
    divided = {id(leaf): (name, leaf) for name, leaf in _tensors(args, kwargs) if name not in replicated and leaf.dim()}
    lengths = [leaf.shape[0] for _, leaf in divided.values()]
    rows = next((length for length in lengths if length != 1), len(lengths) and 1)
    _refuse(divided.values(), rows, chunks)
    sizes = [len(part) for part in torch.empty(rows, 0, device="meta").chunk(chunks)]
    parts = {key: _parts(leaf, chunks) for key, (_, leaf) in divided.items() if leaf.shape[0] == rows}
    lists = [parts.get(id(leaf), [leaf] * len(sizes)) for leaf in leaves]
    calls = [unflatten(list(each), spec) for each in zip(*lists, strict=True)]
    return [MicroBatch(args, kwargs, size / rows) for (args, kwargs), size in zip(calls, sizes, strict=True)]


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str | int, Tensor]]:
    """Yield the tensors of a call with the name, or the position, of their argument."""
    named: list[tuple[str | int, Any]] = [*enumerate(args), *kwargs.items()]
    for name, value in named:
        yield from ((name, leaf) for leaf in flatten(value)[0] if isinstance(leaf, Tensor))


def _refuse(tensors: Iterable[tuple[str | int, Tensor]], rows: int, chunks: int) -> None:
    """
    Raises:
        ValueError: these tensors can't be divided.
    """
    if rows == 0:
        raise ValueError(f"a mini-batch without rows can't be divided into chunks={chunks} micro-batches")
    for name, leaf in tensors:
        if leaf.grad_fn is not None:
            raise ValueError(
                f"argument {name!r} is the result of an op that has to be differentiated; give x.detach(), with "
                "requires_grad_() for its gradient, and go on backward from its .grad"
            )
        if leaf.shape[0] not in (1, rows):
            raise ValueError(
                f"argument {name!r} has {leaf.shape[0]} rows, and others have {rows}; if each micro-batch needs it "
                f"whole, give memgraph.pipeline replicated=[{name!r}]"
            )


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
    for name, each in module.named_modules():
        yield f"the training mode of {name or 'the model'}: {each.training}"
    for name, parameter in module.named_parameters():
        yield f"requires_grad of parameter {name}, which has to change on all ranks: {parameter.requires_grad}"
    yield f"autocast: {torch.is_autocast_enabled('cpu')}"


def batch_nbytes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the bytes of a call's tensors, and of their gradients."""
    leaves, _ = flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    gradients = sum(leaf.nbytes for leaf in tensors if leaf.requires_grad)
    return gradients + sum(leaf.untyped_storage().nbytes() for leaf in tensors)
