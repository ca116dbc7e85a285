"""Give a trace the values that a real forward has recorded, and record guards in it.

if x.isfinite().all(): ...     gets True, and records equal(all, [True])
rows = mask.nonzero()          a result of shape (7, 2), and records that it has this size
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from ...errors import CaptureError
from ...graph.aten_shims import SUM_ROWS
from ...graph.guard_ops import EQUAL, SIZED, Scalars, values_of
from ...graph.nodes import UNGUARDED, aten
from ...graph.tensor_numbers import TensorNumbers
from .questions import INDEXED, Answer, ValueMode, ValuesNeeded, is_mask, is_row, question


class ReplayValues(ValueMode):
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
        self.trained: set[int] = set()  # ids of leaves that Python in backward reads, to differentiate
        self._given = iter(answers or ())
        self._number = 0
        self._rows: dict[object, Tensor] = {}  # of masks in forward
        self._masks: list[Tensor] = []  # keeps their storages
        self._counts: dict[object, int] = {}  # of values that masks select
        self._row_masks: dict[object, Tensor] = {}  # to whose rows forward writes one row
        self._rows_to_sum: list[tuple[Tensor, Tensor, Tensor]] = []  # with their source and mask

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.in_backward and torch.is_grad_enabled():
            read = (leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
            self.trained.update(id(leaf) for leaf in read if leaf.requires_grad and leaf.is_leaf)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def values(self, tensor: Tensor) -> Scalars:
        known = self.constant(tensor)
        if known is not None:
            self._take("values", tensor, needed=False)
            with _disable_current_modes():
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
        if masks and INDEXED[func] is not None and is_row(*args[:3]):
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
        answer, asked = next(self._given, None), question(name, tensor)
        while answer is not None and answer.question != asked:
            answer = next(self._given, None)  # a check of torch's own that it leaves out for fake tensors
        if answer is None:
            raise _other_questions(asked)
        return answer

    def _next(self) -> int:
        self._number += 1
        return self._number - 1

    def _sized(self, func: OpOverload, args: Any, kwargs: Any, answer: Answer, guard: int) -> Any:
        dtypes = [str(dtype).removeprefix("torch.") for dtype in answer.dtypes]  # torch 2.11 passes dtypes as numbers
        described = {"sizes": list(answer.values), "strides": list(answer.strides), "dtypes": dtypes}
        return SIZED[func](*args, **kwargs, **described, guard=guard)


def _key(tensor: Tensor) -> object:
    """Return what tells one view of a traced tensor from another."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def _other_questions(question: str) -> CaptureError:
    return CaptureError(
        f"forward reads {question} when it is traced, and not when it runs: which values it reads must not depend on "
        "what is neither an argument nor an attribute, nor on whether tensors are fake"
    )
