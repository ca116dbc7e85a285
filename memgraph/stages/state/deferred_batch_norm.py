"""BatchNorm whose running statistics are those of whole mini-batches, although forward sees micro-batches.

8 rows in 4 micro-batches: 4 updates, each by 2 rows    ->    one update, by the mean and variance of 8 rows

Each micro-batch is still normalized by its own statistics. They are combined by the formula of Chan et al., "Algorithms
for computing the sample variance" (1983).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

STATISTICS = ("mean", "squares", "chunk_mean", "chunk_var", "earlier_mean", "earlier_var")


class _Deferred(nn.Module):
    """A BatchNorm with further buffers, which its state dict does not have.

    Attributes:
        count: elements of each channel in this mini-batch so far.
        mean, squares: their mean, and the sum of the squares of their differences from it.
        chunk_mean, chunk_var: the statistics of the latest micro-batch.
        earlier_mean, earlier_var, earlier_batches: the running statistics before this mini-batch.
    """

    count: Tensor
    mean: Tensor
    squares: Tensor
    chunk_mean: Tensor
    chunk_var: Tensor
    earlier_mean: Tensor
    earlier_var: Tensor
    earlier_batches: Tensor

    def begin(self) -> None:
        """Begin a mini-batch."""
        with torch.no_grad():
            for name in ("count", *STATISTICS):
                getattr(self, name).zero_()
            norm: Any = self
            self.earlier_mean.copy_(norm.running_mean)
            self.earlier_var.copy_(norm.running_var)
            self.earlier_batches.copy_(norm.num_batches_tracked)

    def forward(self, input: Tensor) -> Tensor:
        norm: Any = self
        if not self.training:
            result: Tensor = super().forward(input)
            return result
        norm._check_input_dim(input)
        statistics = self.chunk_mean, self.chunk_var  # with momentum=1 they are replaced
        result = F.batch_norm(input, *statistics, norm.weight, norm.bias, training=True, momentum=1.0, eps=norm.eps)
        with torch.no_grad():
            self._add(*statistics, input.numel() // input.shape[1])
        return result

    def _add(self, mean: Tensor, variance: Tensor, count: int) -> None:
        """Update the running statistics, as if this micro-batch were the last of the mini-batch."""
        total = self.count + count
        difference = mean - self.mean
        self.squares.add_(variance * (count - 1) + difference.square() * (self.count * count / total))
        self.mean.add_(difference * (count / total))
        self.count.copy_(total)
        norm: Any = self
        norm.num_batches_tracked.copy_(self.earlier_batches + 1)
        share = 1 / norm.num_batches_tracked if norm.momentum is None else norm.momentum
        norm.running_mean.copy_((1 - share) * self.earlier_mean + share * self.mean)
        norm.running_var.copy_((1 - share) * self.earlier_var + share * self.squares / (total - 1))


class DeferredBatchNorm1d(_Deferred, nn.BatchNorm1d):
    """`nn.BatchNorm1d` with the statistics of mini-batches."""


class DeferredBatchNorm2d(_Deferred, nn.BatchNorm2d):
    """`nn.BatchNorm2d` with the statistics of mini-batches."""


class DeferredBatchNorm3d(_Deferred, nn.BatchNorm3d):
    """`nn.BatchNorm3d` with the statistics of mini-batches."""


CLASSES: dict[type[nn.Module], type[_Deferred]] = {
    nn.BatchNorm1d: DeferredBatchNorm1d,
    nn.BatchNorm2d: DeferredBatchNorm2d,
    nn.BatchNorm3d: DeferredBatchNorm3d,
}
KINDS = (*CLASSES, nn.SyncBatchNorm)


def refuse_others(model: nn.Module) -> None:
    """
    Raises:
        ValueError: the model has a BatchNorm of another class, whose forward may do anything.
    """
    for name, module in model.named_modules():
        if isinstance(module, KINDS) and not isinstance(module, (*CLASSES.values(),)) and type(module) not in CLASSES:
            raise ValueError(
                f"deferred_batch_norm=True is for {', '.join(each.__name__ for each in CLASSES)}, and {name!r} is a "
                f"{type(module).__name__}; put one of these in its place, or give deferred_batch_norm=False"
            )


def defer_batch_norm(model: nn.Module) -> None:
    """Give each BatchNorm of the model that tracks statistics the class and the buffers of a deferred one."""
    for module in list(model.modules()):
        mean, batches = getattr(module, "running_mean", None), getattr(module, "num_batches_tracked", None)
        if type(module) in CLASSES and isinstance(mean, Tensor) and isinstance(batches, Tensor):
            for name in STATISTICS:
                module.register_buffer(name, torch.zeros_like(mean), persistent=False)
            module.register_buffer("count", torch.zeros_like(mean[0]), persistent=False)
            module.register_buffer("earlier_batches", torch.zeros_like(batches), persistent=False)
            module.__class__ = CLASSES[type(module)]


def begin_mini_batch(model: nn.Module) -> None:
    """Let each deferred BatchNorm of this rank begin a mini-batch."""
    for module in model.modules():
        if isinstance(module, _Deferred) and not module.mean.is_meta:
            module.begin()
