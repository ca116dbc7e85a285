"""The questions that Python asks about values of tensors, found among the ops of forward and backward.

    if x.isfinite().all(): ...   ->   the values of torch.bool ()
    rows = mask.nonzero()        ->   the sizes of what aten.nonzero returns

A real run records the answers, and a trace, which has no values of its own, replays them. Both see the same questions
in the same order, or the capture is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...graph.guard_ops import SIZED, Scalars
from ...graph.nodes import DEVICE_OF, aten
from ...graph.provenance import user_line
from ...guards.refused_collectives import refuse_collective

READS = aten._local_scalar_dense.default
RANDOM_BETWEEN = getattr(aten.random_, "from")  # no code of a graph can name it
MASKS = (torch.bool, torch.uint8)
# Ops that take masks as indices, with the position of a value whose gradient has as many rows as the masks select.
INDEXED = {
    aten.index.Tensor: None,
    aten.index_put.default: 2,
    aten.index_put_.default: 2,
    aten._index_put_impl_.default: 2,
}


class ValuesNeeded(Exception):
    """A trace needs values of tensors, and has none."""


@dataclass(frozen=True)
class Answer:
    """The answer to one question.

    Attributes:
        question: op and shape.
        values: numbers of a tensor, or the sizes of an op's results.
        strides, dtypes: of an op's results.
    """

    question: str
    values: Scalars
    strides: tuple[int, ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()


class ValueMode(TorchDispatchMode):
    """Finds the questions among the ops of forward and backward."""

    supports_higher_order_operators = True  # they are passed on, and refused below

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE_OF and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        refuse_collective(func)
        args, kwargs = self.arguments(func, args, kwargs or {})
        if func is RANDOM_BETWEEN and (shifted := _shifted_draw(*args, **kwargs)) is not None:
            return shifted
        if func is READS:
            return self.values(args[0])[0]
        if func is aten.equal.default:
            return self.equal(*args)
        if func is aten.allclose.default:
            return bool(self.values(aten.isclose.default(*args, **kwargs).all())[0])
        if func in SIZED and kwargs.get("output_size") is None:
            return self.sized(func, args, kwargs)
        if func in INDEXED and self.splits(func, args):
            args = (args[0], [part for index in args[1] for part in self._split(index)], *args[2:])
        elif self.sums_rows(func, args):
            return self.summed_rows(func, args)
        elif func is aten.masked_scatter.default and _needs_grad(args[2]):
            self.masked_scatter(*args)
        elif func is aten.masked_scatter_backward.default:
            return self.masked_scatter_backward(*args)
        return func(*args, **kwargs)

    def splits(self, func: OpOverload, args: Any) -> bool:
        """Return True if masks among the indices are replaced by the indices that they select.

        Otherwise no size of forward or backward depends on them.
        """
        value = INDEXED[func]
        return any(map(is_mask, args[1])) and (value is None or (_needs_grad(args[value]) and not is_row(*args[:3])))

    def sums_rows(self, func: OpOverload, args: Any) -> bool:
        """Return True in backward, for the gradient of one row that was written to all rows of a mask."""
        return False

    def summed_rows(self, func: OpOverload, args: Any) -> Any:
        raise NotImplementedError

    def arguments(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        """Return the arguments that an op takes."""
        return args, kwargs

    def values(self, tensor: Tensor) -> Scalars:
        """Return the numbers of a tensor."""
        raise NotImplementedError

    def number(self, tensor: Tensor) -> Any:
        """Return the number of a tensor that has one."""
        return self.values(tensor)[0]

    def equal(self, tensor: Tensor, other: Tensor) -> bool:
        same = tensor.shape == other.shape and tensor.dtype == other.dtype
        return same and bool(self.values((tensor == other).all())[0])

    def sized(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        """Return the results of an op whose sizes depend on values."""
        raise NotImplementedError

    def nonzero(self, mask: Tensor) -> Tensor:
        return self.sized(aten.nonzero.default, (mask,), {})

    def masked_scatter(self, tensor: Tensor, mask: Tensor, source: Tensor) -> None:
        """Find how many values the mask selects, which is a size in backward."""
        self.values(mask.expand(torch.broadcast_shapes(tensor.shape, mask.shape)).sum())

    def masked_scatter_backward(self, gradient: Tensor, mask: Tensor, sizes: Sequence[int]) -> Tensor:
        return aten.masked_scatter_backward.default(gradient, mask, sizes)

    def _split(self, index: Any) -> list[Any]:
        """Return the indices of integers that a mask stands for, as torch itself computes them."""
        if not is_mask(index):
            return [index]
        rows = self.nonzero(index)
        return [rows.select(1, column) for column in range(index.dim())]


def _shifted_draw(tensor: Tensor, low: int, high: int | None, generator: Any = None) -> Tensor | None:
    """Draw from 0 and shift, which gives the same bits where a type holds all these numbers; None where it does not."""
    exact = 2 / torch.finfo(tensor.dtype).eps if tensor.is_floating_point() else 2**63
    if high is None or tensor.is_complex() or (low and max(abs(low), abs(high), high - low) > exact):
        return None
    drawn = aten.random_.to(tensor, high - low, generator=generator)
    return drawn.add_(low) if low else drawn


def is_number(answer: Answer) -> bool:
    """Return True for the answer to a question for one number."""
    return answer.question.startswith("values of ") and len(answer.values) == 1 and type(answer.values[0]) is not bool


def is_condition(answer: Answer) -> bool:
    """Return True for the answer to a question for one truth value, which has no sizes."""
    return answer.question.startswith("values of torch.bool () ") and type(answer.values[0]) is bool


def is_mask(index: object) -> bool:
    """Return True for an index that selects elements."""
    return isinstance(index, Tensor) and index.dtype in MASKS


def is_row(tensor: Tensor, indices: Sequence[Any], value: Tensor) -> bool:
    """Return True if a value is written to each row that a mask selects, so that its gradient is a sum over them."""
    return len(indices) == 1 and is_mask(indices[0]) and value.dim() <= tensor.dim() - indices[0].dim()


def _needs_grad(tensor: Tensor) -> bool:
    return torch.is_grad_enabled() and tensor.requires_grad


def question(name: str, tensor: Tensor) -> str:
    """Return a question about a tensor, with the line that asks."""
    return f"{name} of {tensor.dtype} {tuple(tensor.shape)} at {user_line(sys._getframe())}"
