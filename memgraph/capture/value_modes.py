"""Record the values that Python asks for in a real forward, and give them to a trace.

    if x.isfinite().all(): ...     real run: records True       trace: gets True, and records a guard
    rows = mask.nonzero()          real run: records (7, 2)     trace: a result of that size, which is a guard

A trace has no values of its own.  Both modes see the same questions in the same order, or the capture is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from ..errors import CaptureError
from ..graph.aten_shims import SUM_ROWS
from ..graph.guard_ops import EQUAL, SIZED, TOLIST, Scalars, sizes_of, strides_of, values_of
from ..graph.nodes import UNGUARDED, aten
from ..graph.provenance import user_line
from ..graph.tensor_numbers import TensorNumbers

ONE_HOT = nn.functional.one_hot
READS = aten._local_scalar_dense.default
ITEM, IS_NONZERO = torch.Tensor.item, torch.Tensor.__bool__
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


class _ValueMode(TorchDispatchMode):
    """Finds the questions among the ops of forward and backward."""

    supports_higher_order_operators = True  # they are passed on, and refused below

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = self.arguments(func, args, kwargs or {})
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
        return any(map(is_mask, args[1])) and (value is None or (_needs_grad(args[value]) and not _is_row(*args[:3])))

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


class RecordValues(_ValueMode):
    """Records answers while a forward runs on real tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.answers: list[Answer] = []

    def values(self, tensor: Tensor) -> Scalars:
        with _disable_current_modes():
            values = values_of(tensor)
        self.answers.append(Answer(_question("values", tensor), values))
        return values

    def sized(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        results = func(*args, **kwargs)
        dtypes = tuple(tensor.dtype for tensor in tree_leaves(results))
        answer = Answer(_question(str(func), args[0]), tuple(sizes_of(results)), tuple(strides_of(results)), dtypes)
        self.answers.append(answer)
        return results


class ReplayValues(_ValueMode):
    """Gives answers to a trace, and records guards in it.

    Args:
        answers: None if they are not known.
        constant: returns the value of a traced tensor that no input affects, or None.
        numbers: makes stand-ins for numbers; None to guard each number that is read.
    """

    def __init__(
        self, answers: Sequence[Answer] | None, constant: Callable[[Tensor], Tensor | None],
        numbers: TensorNumbers | None = None,
    ) -> None:  # fmt: skip
        super().__init__()  # type: ignore[no-untyped-call]
        self.answers, self.constant, self.numbers = answers, constant, numbers
        if numbers is not None:
            numbers.next_guard = self._next
        self.in_backward = False
        self._given = iter(answers or ())
        self._number = 0
        self._rows: dict[object, Tensor] = {}  # of masks in forward
        self._masks: list[Tensor] = []  # keeps their storages
        self._counts: dict[object, int] = {}  # of values that masks select
        self._row_masks: dict[object, Tensor] = {}  # to whose rows forward writes one row
        self._rows_to_sum: list[tuple[Tensor, Tensor, Tensor]] = []  # with their source and mask

    def values(self, tensor: Tensor) -> Scalars:
        known = self.constant(tensor)
        if known is not None:
            self._take("values", tensor, needed=False)
            with _disable_current_modes(), torch._C.DisableTorchFunction():  # or it asks the trace's `tolist`
                return values_of(known)
        values = self._take("values", tensor).values
        EQUAL(tensor, list(values), guard=self._next())
        return values

    def number(self, tensor: Tensor) -> Any:
        if self.numbers is None or self.constant(tensor) is not None:
            return self.values(tensor)[0]
        values = self._take("values", tensor).values
        number = self.numbers.read(tensor, values[0])
        if number is None:
            EQUAL(tensor, list(values), guard=self._next())
        return values[0] if number is None else number

    def arguments(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        return (args, kwargs) if self.numbers is None else self.numbers.in_arguments(func, args, kwargs)

    def sized(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        answer = self._take(str(func), args[0])
        return self._sized(func, args, kwargs, answer, self._next())

    def splits(self, func: OpOverload, args: Any) -> bool:
        masks = list(filter(is_mask, args[1]))
        if masks and INDEXED[func] is not None and _is_row(*args[:3]):
            self._row_masks[_key(masks[0])] = masks[0]
        if self._takes_rows(func, args):
            return False
        return super().splits(func, args) or (self.in_backward and all(_key(mask) in self._rows for mask in masks))

    def _takes_rows(self, func: OpOverload, args: Any) -> bool:
        if not self.in_backward or func is not aten.index.Tensor or len(args[1]) != 1 or not is_mask(args[1][0]):
            return False
        return _key(args[1][0]) in self._row_masks and _key(args[1][0]) not in self._rows

    def sums_rows(self, func: OpOverload, args: Any) -> bool:
        return self._takes_rows(func, args) or any(args[0] is rows for rows, _, _ in self._rows_to_sum if args)

    def summed_rows(self, func: OpOverload, args: Any) -> Any:
        if func is aten.index.Tensor:
            gradient, mask = args[0], args[1][0]
            rows = gradient.new_empty((mask.numel(), *gradient.shape[mask.dim() :]))  # as many as there can be
            self._rows_to_sum.append((rows, gradient, mask))
            return rows
        if func is not aten.sum.dim_IntList:
            raise ValuesNeeded
        _, gradient, mask = next(entry for entry in self._rows_to_sum if entry[0] is args[0])
        return SUM_ROWS(gradient, mask, args[1], args[2])

    def nonzero(self, mask: Tensor) -> Tensor:
        key = _key(mask)
        if key not in self._rows:
            self._masks.append(mask)
            self._rows[key] = super().nonzero(mask)
        elif not self.in_backward:
            self._take(str(aten.nonzero.default), mask)
        return self._rows[key]

    def masked_scatter(self, tensor: Tensor, mask: Tensor, source: Tensor) -> None:
        count = mask.expand(torch.broadcast_shapes(tensor.shape, mask.shape)).sum()
        self._masks.append(mask)
        self._counts[_key(mask)] = int(self.values(count)[0])

    def masked_scatter_backward(self, gradient: Tensor, mask: Tensor, sizes: Sequence[int]) -> Tensor:
        count = self._counts.get(_key(mask))
        if count is None:
            raise ValuesNeeded
        size = Answer("", (1, count), (1, 1), (gradient.dtype,))
        selected = self._sized(aten.masked_select.default, (gradient, mask), {}, size, UNGUARDED)
        missing = torch.Size(sizes).numel() - count
        if missing > 0:
            selected = torch.cat([selected, selected.new_zeros(missing)], 0)
        return selected.view(sizes)

    def _take(self, name: str, tensor: Tensor, needed: bool = True) -> Answer:
        if self.answers is None or self.in_backward:
            if needed:
                raise ValuesNeeded
            return Answer("", ())
        answer, question = next(self._given, None), _question(name, tensor)
        while answer is not None and answer.question != question:
            answer = next(self._given, None)  # a check of torch's own that it leaves out for fake tensors
        if answer is None:
            raise _other_questions(question)
        return answer

    def _next(self) -> int:
        self._number += 1
        return self._number - 1

    def _sized(self, func: OpOverload, args: Any, kwargs: Any, answer: Answer, guard: int) -> Any:
        described = {"sizes": list(answer.values), "strides": list(answer.strides), "dtypes": list(answer.dtypes)}
        return SIZED[func](*args, **kwargs, **described, guard=guard)


Mode = TypeVar("Mode", bound=_ValueMode)


@contextmanager
def answering(mode: Mode) -> Iterator[Mode]:
    """Enter a mode, and let it answer `Tensor.tolist`, which reads memory without an op, and the size of `one_hot`.

    It answers `Tensor.item` and `bool` too: torch would put a plain number in the place of a stand-in. What `print`
    shows of a tensor is no question.
    """
    thread = get_ident()
    text: Callable[..., str] = torch.Tensor.__repr__

    def item(self: Tensor) -> Any:
        return mode.number(self) if get_ident() == thread and self.numel() == 1 else ITEM(self)

    def is_nonzero(self: Tensor) -> bool:
        return bool(mode.number(self)) if get_ident() == thread and self.numel() == 1 else IS_NONZERO(self)

    def tolist(self: Tensor) -> Any:
        return _nested(list(mode.values(self)), self.shape) if get_ident() == thread else TOLIST(self)

    def shown(self: Tensor, **kwargs: Any) -> str:
        if get_ident() != thread or isinstance(self, FakeTensor):
            return text(self, **kwargs)
        with (
            _disable_current_modes(),
            mock.patch.object(torch.Tensor, "item", ITEM),
            mock.patch.object(torch.Tensor, "__bool__", IS_NONZERO),
            mock.patch.object(torch.Tensor, "tolist", TOLIST),
        ):
            return text(self, **kwargs)

    with (
        mock.patch.object(torch.Tensor, "item", item),
        mock.patch.object(torch.Tensor, "__bool__", is_nonzero),
        mock.patch.object(torch.Tensor, "tolist", tolist),
        mock.patch.object(FakeTensor, "tolist", tolist),
        mock.patch.object(torch.Tensor, "__repr__", shown),
        mock.patch.object(nn.functional, "one_hot", _one_hot),
        mode,
    ):
        yield mode


def _one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    """Return what torch's own makes, which looks at other values where tensors are fake."""
    classes = int(tensor.max().item()) + 1 if num_classes == -1 else num_classes
    return ONE_HOT(tensor, classes)


def _nested(values: list[Any], shape: Sequence[int]) -> Any:
    """Return numbers as nested lists of this shape."""
    if not shape:
        return values[0]
    size = len(values) // shape[0] if shape[0] else 0
    return [_nested(values[i * size : (i + 1) * size], shape[1:]) for i in range(shape[0])]


def is_number(answer: Answer) -> bool:
    """Return True for the answer to a question for one number."""
    return answer.question.startswith("values of ") and len(answer.values) == 1 and type(answer.values[0]) is not bool


def is_mask(index: object) -> bool:
    """Return True for an index that selects elements."""
    return isinstance(index, Tensor) and index.dtype in MASKS


def _is_row(tensor: Tensor, indices: Sequence[Any], value: Tensor) -> bool:
    """Return True if a value is written to each row that a mask selects, so that its gradient is a sum over them."""
    return len(indices) == 1 and is_mask(indices[0]) and value.dim() <= tensor.dim() - indices[0].dim()


def _needs_grad(tensor: Tensor) -> bool:
    return torch.is_grad_enabled() and tensor.requires_grad


def _question(name: str, tensor: Tensor) -> str:
    return f"{name} of {tensor.dtype} {tuple(tensor.shape)} at {user_line(sys._getframe())}"


def _key(tensor: Tensor) -> object:
    """Return what tells one view of a traced tensor from another."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def _other_questions(question: str) -> CaptureError:
    return CaptureError(
        f"forward reads {question} when it is traced, and not when it runs: which values it reads must not depend on "
        "what is neither an argument nor an attribute, nor on whether tensors are fake"
    )
