"""Averaged gradients that are kept for the next step, since somebody has looked at them or scaled them.

    optimizer.clip_grad_norm_(1.0)     averages, and holds the averages of this rank's pieces
    optimizer.step()                   updates with what is held

The parameters' own gradients stay what they are on each rank. If they are changed in between, what is held is no longer
their mean: that is an error, unless they are new ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from ..errors import ShardError
from ..tensors.versions import version_of
from .shards.shard_views import BucketViews


class HeldGradients:
    """The averaged gradients of this rank's pieces."""

    def __init__(
        self, parameters: Sequence[Tensor], kinds: Sequence[int], gradients: Sequence[tuple[BucketViews, list[Tensor]]]
    ) -> None:
        self.kinds, self.gradients = list(kinds), list(gradients)
        self.parameters = list(parameters)
        self.seen = [(parameter.grad, _version(parameter.grad)) for parameter in parameters]

    def gradients_of(self, laid: BucketViews) -> list[Tensor]:
        """The averages for the own pieces of a bucket."""
        return next(gradients for one, gradients in self.gradients if one.bucket is laid.bucket)

    def own(self) -> Iterator[tuple[int, Tensor]]:
        """Each gradient, with its parameter's number."""
        for laid, gradients in self.gradients:
            for (piece, _), gradient in zip(laid.own, gradients, strict=True):
                if self.kinds[piece.param]:
                    yield piece.param, gradient

    def scale(self, factor: Tensor) -> None:
        """Multiply all of them."""
        for _, gradient in self.own():
            gradient.mul_(factor.to(gradient.device))

    def seen_now(self) -> HeldGradients:
        """The same averages, taken for those of the gradients as they are now."""
        self.seen = [(parameter.grad, _version(parameter.grad)) for parameter in self.parameters]
        return self

    def is_of(self, parameters: Sequence[Tensor]) -> bool:
        """Whether these are the averages of the gradients that there are.

        Raises:
            ShardError: some have been changed in place since.
        """
        now = [parameter.grad for parameter in parameters]
        if len(now) != len(self.seen):
            return False
        pairs = list(zip(now, self.seen, strict=True))
        if any(grad is not was for grad, (was, _) in pairs):
            return False
        if any(_version(grad) != version for grad, (_, version) in pairs):
            message = "gradients were changed after they had been averaged for clip_grad_norm_"
            raise ShardError(f"{message}; call it after the last backward, or zero_grad() before the next")
        return True


class VersionKey(HeldGradients):
    """Gradients that are the same on all ranks: the parameters' own, so that what scales them is seen there."""

    def scale(self, factor: Tensor) -> None:
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor.to(parameter.grad.device))


def _version(gradient: Tensor | None) -> int:
    return 0 if gradient is None else version_of(gradient)
