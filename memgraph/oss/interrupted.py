"""A step that the disk of some rank has interrupted, which all ranks are told of, and go on with together.

    rank 0: all buckets are updated          step()  ->  SpillError on both, which says what to do
    rank 1: the disk fails in bucket 2   ->  step()  ->  rank 1 does what is left of bucket 2, and those behind it;
                                                         all is averaged and gathered again

Nothing is torn as long as gradients and parameters stay as they are; or else an earlier state has to be loaded into
model and optimizer, on all ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..tensors.versions import version_of
from .shards.param_groups import Group

if TYPE_CHECKING:
    from .optimizer import OSS

ON, ANEW, TORN = range(3)  # the step can go on; an earlier state is there; neither


@dataclass(eq=False)
class StepInProgress:
    """A step that is under way on this rank."""

    kinds: Sequence[int]  # of gradients
    kwargs: Group
    loss: Any
    done: set[int] = field(default_factory=set)  # buckets, by their numbers


class InterruptedStep:
    """What is left of such a step on this rank."""

    def __init__(self, begun: StepInProgress, oss: OSS) -> None:
        self.begun, self.oss = begun, oss
        self.is_loaded = False  # the optimizer has an earlier state again
        self.parameters = list(map(TensorMark, oss.layout.parameters))
        self.gradients = list(map(TensorMark, self._gradients()))

    def way(self) -> int:
        """What can come now."""
        now = self.oss.layout.parameters
        if len(now) != len(self.parameters):
            return TORN
        if self.is_loaded:
            changed = not any(was.is_of(p) for was, p in zip(self.parameters, now, strict=True) if p.numel())
            return ANEW if changed else TORN
        return ON if _same(self.parameters, now) and _same(self.gradients, self._gradients()) else TORN

    def _gradients(self) -> list[Tensor | None]:
        return [*(parameter.grad for parameter in self.oss.layout.parameters), *self.oss.sharded_grads.shards.values()]


class TensorMark:
    """What a tensor was; does not keep it."""

    def __init__(self, tensor: Tensor | None) -> None:
        self.known = weakref.ref(tensor) if tensor is not None else None
        self.state = _state(tensor)

    def is_of(self, tensor: Tensor | None) -> bool:
        """Whether it is this one, as it was."""
        return (self.known() if self.known is not None else None) is tensor and self.state == _state(tensor)


def _same(marks: Sequence[TensorMark], tensors: Sequence[Tensor | None]) -> bool:
    return len(marks) == len(tensors) and all(mark.is_of(tensor) for mark, tensor in zip(marks, tensors, strict=True))


def _state(tensor: Tensor | None) -> tuple[int, int]:
    """Where it lies, and how often it was written."""
    if tensor is None:
        return 0, 0
    return 0 if tensor.is_sparse else tensor.data_ptr(), version_of(tensor)
