"""Observe the ops of a part while it runs: the bytes that they make, and what they write to.

    with ObservedOps([x], limit=1024) as ops:
        y = x * 2        ->   ops.nbytes == y.nbytes
        x.add_(1)        ->   WriteError, before x is changed

How much memory a part takes may depend on values. What its ops make in forward is known before backward begins.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..graph.nodes import written_arguments


class TooManyBytesError(Exception):
    """Ops have made more bytes than the limit."""


class WriteError(Exception):
    """An op is about to write to a protected tensor.

    Attributes:
        place: the tensor's position.
    """

    def __init__(self, place: int) -> None:
        super().__init__(f"an op writes to tensor {place}")
        self.place = place


class ObservedOps(TorchDispatchMode):
    """Adds up the bytes of what ops return, views left out.

    Of `tensors`, ops may write to those at the positions `writable`. `written` are the positions of what they wrote to.
    """

    def __init__(self, tensors: Sequence[Tensor], writable: Iterable[int] = (), limit: float = math.inf) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.limit, self.nbytes, self.written = limit, 0, set[int]()
        self._writable = frozenset(writable)
        self._places = {_storage(tensor): place for place, tensor in enumerate(tensors)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in tree_leaves(written_arguments(func, args, kwargs)):
            if _is_dense(tensor):
                self._write(tensor)
        result = func(*args, **kwargs)
        if not func.is_view:
            self.nbytes += sum(leaf.nbytes for leaf in tree_leaves(result) if _is_dense(leaf))
            if self.nbytes > self.limit:
                raise TooManyBytesError
        return result

    def _write(self, tensor: Tensor) -> None:
        place = self._places.get(_storage(tensor))
        if place is not None and place not in self._writable:
            raise WriteError(place)
        if place is not None:
            self.written.add(place)


def _is_dense(leaf: object) -> bool:
    """Return True for a tensor with one storage; the parts of a sparse one are results of other ops."""
    return isinstance(leaf, Tensor) and leaf.layout == torch.strided and not leaf.is_nested


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
