"""Observe the ops of a part while it runs: the bytes that they make, and what they write to.

    with ObservedOps([x]) as ops:
        y = x * 2        ->   ops.live.peak == y.nbytes, ops.made == [(aten.mul.Tensor, y.nbytes)]
        x.add_(1)        ->   WriteError, before x is changed

How much memory a part takes may depend on values. What its ops make in forward is known before backward begins.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..graph.nodes import written_arguments
from ..guards.refused_collectives import refuse_collective
from .live_bytes import LiveBytes

Made = tuple[Any, int]  # an op, and the bytes that it made
# Ops with this tag that ask for values only where an index is a mask.
INDEXING = (torch.ops.aten.index.Tensor,)


class TooManyBytesError(Exception):
    """More bytes are alive at once than the limit, or would be in backward."""


class WriteError(Exception):
    """An op is about to write to a protected tensor.

    Attributes:
        place: the tensor's position.
    """

    def __init__(self, place: int) -> None:
        super().__init__(f"an op writes to tensor {place}")
        self.place = place


class ObservedOps(TorchDispatchMode):
    """Counts the bytes of what ops return, views left out, as long as it lives.

    Of `tensors`, ops may write to those at the positions `writable`. `written` are the positions of what they wrote to.
    `kept` counts as well what autograd would keep, `asks` is True once an op's result depends on values in its form.
    Peaks below `limits`, of `live` and of `kept`, are not looked for.
    """

    def __init__(
        self, tensors: Sequence[Tensor], writable: Iterable[int] = (), limits: tuple[float, float] | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.limits = limits or (math.inf, math.inf)
        self.live, self.kept = (LiveBytes(tensors, least) for least in limits or (0, 0))
        self.made, self.written, self.asks = list[Made](), set[int](), False
        self._writable = frozenset(writable)
        self._places = {_storage(tensor): place for place, tensor in enumerate(tensors)}

    def excess(self, made: Sequence[Made]) -> float:
        """Return the bytes by which ops have made more than each of these; infinite if other ops have run."""
        if len(made) != len(self.made) or any(
            op is not other for (op, _), (other, _) in zip(self.made, made, strict=True)
        ):
            return math.inf
        return sum(max(0, nbytes - known) for (_, nbytes), (_, known) in zip(self.made, made, strict=True))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        refuse_collective(func)
        kwargs = kwargs or {}
        for tensor in tree_leaves(written_arguments(func, args, kwargs)):
            if is_dense(tensor):
                self._write(tensor)
        result = func(*args, **kwargs)
        self.asks = self.asks or _asks(func, args)
        if not func.is_view:
            self._count(func, [leaf for leaf in tree_leaves(result) if is_dense(leaf)])
        return result

    def _count(self, func: Any, results: Sequence[Tensor]) -> None:
        self.made.append((func, sum(result.nbytes for result in results)))
        for result in results:
            self.live.add(result)
            self.kept.add(result)
        if self.live.peak > self.limits[0] or self.kept.peak > self.limits[1]:
            raise TooManyBytesError

    def _write(self, tensor: Tensor) -> None:
        place = self._places.get(_storage(tensor))
        if place is not None and place not in self._writable:
            raise WriteError(place)
        if place is not None:
            self.written.add(place)


def is_dense(leaf: object) -> TypeGuard[Tensor]:
    """Return True for a tensor with one storage; the parts of a sparse one are results of other ops."""
    return isinstance(leaf, Tensor) and leaf.layout == torch.strided and not leaf.is_nested


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _asks(func: Any, args: Sequence[Any]) -> bool:
    tags = func.tags
    if torch.Tag.data_dependent_output not in tags and torch.Tag.dynamic_output_shape not in tags:
        return False
    masks = (leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor) and leaf.dtype in (torch.bool, torch.uint8))
    return func not in INDEXING or any(True for _ in masks)
