"""A step: average gradients, update shards, gather parameters, bucket by bucket.

    bucket 0    reduce ......... update gather .........
    bucket 1         reduce ......... update gather .........
    bucket 2              reduce ......... update gather .........

While a bucket is updated, the next ones are averaged and the last ones gathered. An optimizer that is not elementwise
may read all its parameters at once: it runs when all gradients have been averaged.

An error of a disk interrupts the step on all ranks. The next call resumes it, if gradients and parameters are as they
were, or starts over if an earlier state was loaded:

    rank 0: all buckets are updated          step()  ->  SpillError on both, which says what to do
    rank 1: the disk fails in bucket 2   ->  step()  ->  rank 1 updates the rest; all is averaged and gathered again
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import ShardError
from ..storage.spill_file import SpillError
from ..tensors.versions import version_of
from .average_grads import GradAverager, Grads
from .comm.exchange import BucketComm
from .comm.rank_group import all_failures, format_failures
from .offloaded_states import OffloadedShards
from .pending_gathers import PendingGathers
from .shards.layout import ShardLayout
from .shards.param_groups import Group, options
from .shards.shard_optimizer import ShardOptimizer
from .shards.shard_views import BucketViews

AHEAD = 2  # buckets that are averaged, and that are gathered, while one is updated
FAILURE = "exchange of what has failed in the update"
RELOAD = "load an earlier state into model and optimizer, on all ranks"
RESUME, RESTART, REFUSE = range(3)  # what can become of an interrupted step


@dataclass(eq=False)
class StepRun:
    """A step that runs on this rank; `done` are the numbers of its updated buckets."""

    groups: list[Group]
    kinds: Sequence[int]
    kwargs: Group
    loss: Any
    done: set[int] = field(default_factory=set)


class ShardedStep:
    """Runs the steps of one optimizer. `is_half_updated`: a step has failed when some parameters were updated."""

    def __init__(
        self,
        layout: ShardLayout,
        comm: BucketComm,
        optimizer: ShardOptimizer,
        averager: GradAverager,
        pending: PendingGathers,
        offloaded: OffloadedShards,
    ) -> None:
        self.layout, self.comm, self.optimizer = layout, comm, optimizer
        self.averager, self.pending, self.offloaded = averager, pending, offloaded
        self.deferred: set[int] = set()  # buckets that the next forward gathers
        self.is_half_updated = False
        self.interrupted: InterruptedStep | None = None
        self.left_wire_range = False  # parameters of some rank don't fit in the wire dtype
        self.error: Exception | None = None  # raised by the caller's optimizer on this rank
        self.any_failed = False  # it has raised an error on some rank
        self.with_state: set[int] = set()  # indices of parameters that may have states on any rank

    @property
    def is_incomplete(self) -> bool:
        """Return True if some parameters are updated, and no earlier state was loaded since."""
        interrupted = self.interrupted is not None and self._outlook() != RESTART
        return self.is_half_updated or interrupted

    @property
    def frozen_with_state(self) -> tuple[int, ...]:
        """Indices of the parameters that are frozen now and may have states, equal on all ranks."""
        return tuple(i for i in sorted(self.with_state) if not self.layout.parameters[i].requires_grad)

    def note_loaded(self) -> None:
        self.is_half_updated = False
        self.with_state.update(range(len(self.layout.parameters)))
        self.offloaded.forget_interrupted()
        if self.interrupted is not None:
            self.interrupted.is_loaded = True

    def is_resumable(self) -> bool:
        """Return True if an interrupted step is to be resumed; a collective if there is one."""
        if self.interrupted is None:
            return False
        outlook = self._outlook()
        numbers = self.comm.tensor([outlook, -outlook], torch.int32, self.layout.device)
        most, least = self.comm.maximum(numbers, "comparison of what has become of a step").tolist()
        if most == REFUSE or most != -least:
            raise SpillError(
                "a disk has interrupted the last step, which can't be resumed, as gradients, parameters or states of "
                f"some rank have changed: {RELOAD}"
            )
        if outlook == RESTART:
            self.interrupted = None
        return outlook == RESUME

    def _outlook(self) -> int:
        assert self.interrupted is not None
        return self.interrupted.outlook(self.layout.parameters, self._grads())

    def _grads(self) -> list[Tensor | None]:
        return [*(p.grad for p in self.layout.parameters), *self.averager.sharded_grads.shards.values()]

    def resume(self) -> Any:
        """Complete an interrupted step; return its loss."""
        assert self.interrupted is not None
        run, self.interrupted = self.interrupted.run, None
        self._run(run)
        return run.loss

    def run(self, groups: list[Group], kinds: Sequence[int], kwargs: Group, loss: Any) -> None:
        self.with_state.update(i for i, kind in enumerate(kinds) if kind)
        self._run(StepRun(groups, list(kinds), kwargs, loss))

    def _run(self, run: StepRun) -> None:
        used = self.averager.buckets_with_grads(run.kinds)
        self.deferred = self.pending.defer(used)
        self.is_half_updated, self.error, self.any_failed = True, None, False
        with self.comm.watchdog.leaving_on_error():
            if self.optimizer.splits:
                self._by_bucket(used, run)
            else:
                self._at_once(used, run)
            self.pending.note_step(used, self.deferred)
        self.averager.end()
        self._raise_failures(run)
        self.is_half_updated = False
        if self.left_wire_range:
            self.left_wire_range = False
            message = f"parameters leave the range of {self.comm.wire}, so this step sent them as they are"
            raise ShardError(f"{message}; it is complete, but use wire_dtype=torch.bfloat16 for the next")

    def _raise_failures(self, run: StepRun) -> None:
        """Raise if an optimizer or a disk has failed; all ranks have come to the end, and can exchange their errors."""
        error, watchdog = self.error, self.comm.watchdog
        failures = all_failures(watchdog, error, FAILURE) if self.any_failed and self.comm.shares_flags else {}
        if failures and all(each.startswith(f"{SpillError.__name__}:") for each in failures.values()):
            self.pending.gather()  # only the resumed step may write to parameters
            self.is_half_updated = False
            self.interrupted = InterruptedStep(run, self.layout.parameters, self._grads())
            text = f"a disk has failed in the update: {format_failures(failures)}; a part of the parameters is updated"
            raise SpillError(f"{text}: call step() again on all ranks, which does the rest, or {RELOAD}") from error
        if error is not None:
            error.add_note(f"some parameters were updated, on this rank and others; {RELOAD}")
            raise error
        if failures:
            text = f"the update has failed on another rank: {format_failures(failures)}; some parameters were updated"
            raise ShardError(f"{text}, and ranks may differ: {RELOAD}")

    def _by_bucket(self, used: Sequence[BucketViews], run: StepRun) -> None:
        self.averager.begin()
        at_end = self.averager.shared_memory is not None or self.comm.wire is torch.float16
        averaging: deque[Grads] = deque()
        gathering: deque[Callable[[], None]] = deque()
        for turn, bucket in enumerate(used):
            averaging += map(self.averager.start, used[turn + len(averaging) : turn + 1 + AHEAD])
            grads = averaging.popleft()()
            # After an error a rank averages and gathers on, for the others, and updates nothing.
            if self.error is None and bucket.number not in run.done:
                self._update(bucket, grads, run)
                if self.error is None:
                    run.done.add(bucket.number)
            if at_end or bucket.number in self.deferred:
                continue
            gathering.append(self.comm.gather(bucket.bucket, bucket.views))
            if len(gathering) > AHEAD:
                gathering.popleft()()
        if at_end:
            self._gather_all(used)
            return
        any_failed = self.comm.any_rank(self.error is not None)  # behind the last bucket
        for wait in gathering:
            wait()
        self.any_failed = any_failed()

    def _at_once(self, used: Sequence[BucketViews], run: StepRun) -> None:
        self.averager.assign_all(run.kinds)
        inner = self.optimizer.optimizer.param_groups
        given = [options(group) | {"params": own["params"]} for group, own in zip(run.groups, inner, strict=True)]
        kwargs = run.kwargs if run.loss is None else {**run.kwargs, "closure": evaluated_closure(run.loss)}
        self._step(given, kwargs)
        for group, stepped in zip(run.groups, given, strict=True):
            group.update(options(stepped))
        self._gather_all(used)

    def _gather_all(self, used: Sequence[BucketViews]) -> None:
        """Gather all buckets but the deferred ones, unrounded if numbers of any rank leave the range of float16."""
        comm, buckets = self.comm, [bucket for bucket in used if bucket.number not in self.deferred]
        if (reader := self.averager.shared_memory) is not None:
            # If there is nothing to gather, others may still read gradients here.
            failed = self.error is not None
            self.any_failed = reader.gather(buckets, failed) if buckets else reader.meet("end of the step", failed)
            return
        leaves = not comm.fits_wire(view for bucket in buckets for _, view in bucket.own)
        if comm.wire is torch.float16:
            self.left_wire_range = bool(comm.maximum(comm.tensor([leaves], torch.int32, self.layout.device)))
        sender = comm.exact() if self.left_wire_range else comm
        waits = [sender.gather(bucket.bucket, bucket.views) for bucket in buckets]
        any_failed = comm.any_rank(self.error is not None)
        for wait in waits:
            wait()
        self.any_failed = any_failed()

    def _update(self, bucket: BucketViews, grads: Sequence[Tensor], run: StepRun) -> None:
        views = bucket.assign_grads(grads, run.kinds)
        group = run.groups[self.layout.group_of[bucket.bucket.params[0]]]
        given = options(group) | {"params": views}
        if views and bucket.number in self.offloaded.offloaded_owners and not run.kwargs:
            try:
                self.offloaded.update(bucket.number, given)
            except Exception as error:
                self.error = error
            finally:
                _drop_grads(views)
        elif views:
            self._step([given], run.kwargs)
        group.update(options(given))

    def _step(self, groups: list[Group], kwargs: Group) -> None:
        try:
            if self.error is None:
                self.optimizer.step(groups, kwargs)
        except Exception as error:
            self.error = error
        finally:
            for group in groups:
                _drop_grads(group["params"])


def _drop_grads(views: Sequence[Tensor]) -> None:
    for view in views:
        view.grad = None


def evaluated_closure(loss: Any) -> Callable[[], Any]:
    """Return a closure that returns a loss once, for an optimizer that evaluates its closure."""
    calls = []

    def closure() -> Any:
        calls.append(loss)
        if len(calls) > 1:
            raise ShardError("an optimizer other than LBFGS evaluates its closure twice, which can't be sharded")
        return loss

    return closure


class InterruptedStep:
    """A step that an error of a disk has interrupted, with the parameters and gradients of that time."""

    def __init__(self, run: StepRun, parameters: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        self.run, self.is_loaded = run, False
        self.parameters, self.grads = list(map(TensorMark, parameters)), list(map(TensorMark, grads))

    def outlook(self, parameters: Sequence[Tensor], grads: Sequence[Tensor | None]) -> int:
        if len(parameters) != len(self.parameters):
            return REFUSE
        if self.is_loaded:  # then the model has to have loaded its parameters, too
            pairs = zip(self.parameters, parameters, strict=True)
            return REFUSE if any(mark.is_of(p) for mark, p in pairs if p.numel()) else RESTART
        return RESUME if _match(self.parameters, parameters) and _match(self.grads, grads) else REFUSE


class TensorMark:
    """The identity, address and version of a tensor, which it does not keep alive."""

    def __init__(self, tensor: Tensor | None) -> None:
        self.tensor = weakref.ref(tensor) if tensor is not None else None
        self.version = _version(tensor)

    def is_of(self, tensor: Tensor | None) -> bool:
        marked = self.tensor() if self.tensor is not None else None
        return marked is tensor and self.version == _version(tensor)


def _match(marks: Sequence[TensorMark], tensors: Sequence[Tensor | None]) -> bool:
    return len(marks) == len(tensors) and all(mark.is_of(tensor) for mark, tensor in zip(marks, tensors, strict=True))


def _version(tensor: Tensor | None) -> tuple[int, int]:
    if tensor is None:
        return 0, 0
    return 0 if tensor.is_sparse else tensor.data_ptr(), version_of(tensor)
