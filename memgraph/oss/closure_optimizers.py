"""Step an optimizer that evaluates its closure several times (LBFGS): rank 0 steps, all ranks evaluate.

rank 0                                   others
LBFGS.step(evaluate)                     until rank 0 has stepped:
  evaluate: parameters to all,             parameters from rank 0,
            closure, gradients averaged    closure, gradients to rank 0
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import CollectiveError, ShardError
from .average_grads import GradAverager
from .comm.rank_group import all_failures, format_failures
from .grad_presence import exchange_presence
from .shards.param_groups import Group
from .step import FAILURE

STEPPED, EVALUATE, FAILED = 1, 2, 3  # sent by rank 0; the others send 0
Prepare = Callable[[Callable[[], Any]], tuple[Any, BaseException | None]]  # runs a closure, and returns its error


class AllRanksFailed(Exception):
    """All ranks have failed in the same evaluation, this one with `error`."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


def step_with_closure(
    averager: GradAverager, prepare: Prepare, closure: Callable[[], Any] | None, groups: Sequence[Group], kwargs: Group
) -> Any:
    """Step on rank 0, and evaluate on all; return the loss of the first evaluation on this rank."""
    comm, step = averager.comm, _ClosureStep(averager, prepare, closure, groups)
    if comm.rank == 0:
        step.lead(kwargs)
    else:
        while (word := step.send(0)) == EVALUATE:
            try:
                step.evaluate()
            except AllRanksFailed as failed:
                raise failed.error from None
        if word == FAILED:
            failures = all_failures(comm.watchdog, None, FAILURE)
            step.broadcast_parameters()
            raise ShardError(f"the step has failed on another rank: {format_failures(failures)}")
    step.broadcast_parameters()
    return step.losses[0] if step.losses else None


class _ClosureStep:
    def __init__(
        self, averager: GradAverager, prepare: Prepare, closure: Callable[[], Any] | None, groups: Sequence[Group]
    ) -> None:
        self.averager, self.prepare, self.closure, self.groups = averager, prepare, closure, groups
        self.layout, self.comm, self.optimizer = averager.layout, averager.comm, averager.optimizer
        self.losses: list[Any] = []

    def send(self, word: int) -> int:
        return int(self.comm.maximum(self.comm.tensor([word], torch.int32, self.layout.device)))

    def lead(self, kwargs: Group) -> None:
        inner, (group,) = self.optimizer.optimizer, self.groups
        own = inner.param_groups[0]
        own.update({name: value for name, value in group.items() if name in inner.defaults})
        try:
            self.optimizer.step([own], {**kwargs, "closure": self._lead_evaluation})
        except AllRanksFailed as failed:
            raise failed.error from None
        except CollectiveError:  # the group can't send anything any more
            raise
        except BaseException as error:
            self.send(FAILED)
            all_failures(self.comm.watchdog, error, FAILURE)
            self.broadcast_parameters()
            raise
        finally:
            for view in own["params"]:
                view.grad = None
        self.send(STEPPED)

    def _lead_evaluation(self) -> Tensor:
        self.send(EVALUATE)
        return self.evaluate()

    def evaluate(self) -> Tensor:
        """Run the closure on this rank, and return the mean loss; gradients are averaged on rank 0."""
        with torch.no_grad():
            if self.losses:
                self.broadcast_parameters()
            loss, error = self.prepare(self._loss)
            self.losses.append(loss)
            try:
                kinds, _ = exchange_presence(self.comm, self.layout, self.groups, error, {})
            except BaseException as failure:
                raise AllRanksFailed(failure) from failure
            self.averager.sharded_grads.kinds = kinds
            self.averager.assign_all(kinds)
            self.averager.clipped = None
            return self.comm.mean(torch.as_tensor(loss))

    def _loss(self) -> Any:
        if self.closure is None:
            raise TypeError(f"{self.optimizer.name} evaluates its closure several times; call step(closure)")
        loss = self.closure()
        float(loss.detach() if isinstance(loss, Tensor) else loss)  # LBFGS needs a number: fail on all ranks
        return loss

    def broadcast_parameters(self) -> None:
        """Send the parameters of rank 0 to all, unrounded: a line search is lost in rounding errors."""
        exact = self.comm.exact()
        for wait in [exact.gather(bucket.bucket, bucket.views) for bucket in self.layout.buckets]:
            wait()
