"""Step an optimizer that evaluates its closure several times (LBFGS): rank 0 steps, all ranks evaluate.

rank 0                                   others
LBFGS.step(evaluate)                     until rank 0 has stepped:
  evaluate: parameters to all,             parameters from rank 0,
            closure, gradients averaged    closure, gradients to rank 0
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import CollectiveError, ShardError
from .comm.exchange import BucketComm
from .comm.rank_group import all_failures, format_failures
from .shards.layout import ShardLayout
from .shards.param_groups import Group
from .shards.shard_optimizer import ShardOptimizer
from .step import FAILURE

STEPPED, EVALUATE, FAILED = 1, 2, 3  # sent by rank 0; the others send 0


class AllRanksFailed(Exception):
    """All ranks have failed in the same evaluation, this one with `error`."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


def step_with_closure(
    comm: BucketComm,
    layout: ShardLayout,
    optimizer: ShardOptimizer,
    group: Group,
    evaluate: Callable[[], tuple[Any, Tensor]],
    kwargs: Group,
) -> Any:
    """Step on rank 0, and evaluate on all; return the loss of the first evaluation on this rank.

    Args:
        evaluate: runs the closure and averages gradients; returns this rank's loss and the mean of all.

    Raises:
        ShardError: rank 0, or the closure on another rank, failed. Parameters are those of the search so far, equal on
            all ranks.
    """
    losses: list[Any] = []

    def send(word: int) -> int:
        return int(comm.maximum(comm.tensor([word], torch.int32, layout.device)))

    def run() -> Tensor:
        if losses:
            _broadcast_parameters(comm, layout)
        loss, mean = evaluate()
        losses.append(loss)
        return mean

    def lead() -> Tensor:
        send(EVALUATE)
        return run()

    if comm.rank == 0:
        _lead(comm, layout, optimizer, group, lead, send, kwargs)
    else:
        while (word := send(0)) == EVALUATE:
            try:
                run()
            except AllRanksFailed as failed:
                raise failed.error from None
        if word == FAILED:
            failures = all_failures(comm.watchdog, None, FAILURE)
            _broadcast_parameters(comm, layout)
            raise ShardError(f"the step has failed on another rank: {format_failures(failures)}")
    _broadcast_parameters(comm, layout)
    return losses[0] if losses else None


def _lead(
    comm: BucketComm, layout: ShardLayout, optimizer: ShardOptimizer, group: Group, evaluate: Callable[[], Tensor],
    send: Callable[[int], int], kwargs: Group,
) -> None:  # fmt: skip
    (inner,) = optimizer.optimizer.param_groups
    inner.update({name: value for name, value in group.items() if name in optimizer.optimizer.defaults})
    try:
        optimizer.step([inner], {**kwargs, "closure": evaluate})
    except AllRanksFailed as failed:
        raise failed.error from None
    except CollectiveError:  # the group can't send anything any more
        raise
    except BaseException as error:
        send(FAILED)
        all_failures(comm.watchdog, error, FAILURE)
        _broadcast_parameters(comm, layout)
        raise
    finally:
        for view in inner["params"]:
            view.grad = None
    send(STEPPED)


def _broadcast_parameters(comm: BucketComm, layout: ShardLayout) -> None:
    """Send the parameters of rank 0 to all, unrounded: a line search is lost in rounding errors."""
    exact = comm.exact()
    for wait in [exact.gather(bucket.bucket, bucket.views) for bucket in layout.buckets]:
        wait()
