"""A step: gradients averaged, pieces updated, parameters gathered, bucket by bucket.

    bucket 0    reduce ......... update gather .........
    bucket 1         reduce ......... update gather .........
    bucket 2              reduce ......... update gather .........

While a bucket is updated, the next ones are averaged and the last ones are gathered. An optimizer that is not known to
be pointwise may look at all its parameters at once: it is run when all gradients are there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import ShardError
from ..optim.elementwise import unhooked_step
from ..storage.spill_file import SpillError
from .average_grads import Gradients, assign_grads
from .comm.failures import failures, in_words
from .interrupted import ANEW, ON, TORN, InterruptedStep, StepInProgress
from .shards.param_groups import Group, options
from .shards.shard_views import BucketViews

if TYPE_CHECKING:
    from .optimizer import OSS

AHEAD = 2  # buckets that are averaged, and that are gathered, while one is updated
FAILURE = "exchange of what has failed in the update"
MEND = "load an earlier state into model and optimizer, on all ranks"


class ShardedStep:
    """How one optimizer runs its steps."""

    def __init__(self, optimizer: OSS) -> None:
        self.optimizer = optimizer
        self.deferred: list[BucketViews] = []  # what the step that runs leaves to the next forward to gather
        self.is_torn = False  # a step has failed when some parameters were updated
        self.interrupted: InterruptedStep | None = None  # a step that a disk has ended half way
        self.is_left = False  # parameters of some rank are beyond what their way allows
        self.failed: Exception | None = None  # what the caller's optimizer has raised here
        self.has_failed = False  # whether it has, on this rank or another
        self.reached: set[int] = set()  # the parameters (by place) that may have states, on this rank or another

    @property
    def is_half_done(self) -> bool:
        """Whether a disk has ended a step half way, and no earlier state was loaded since."""
        return self.interrupted is not None and self.interrupted.way() != ANEW

    @property
    def rested(self) -> tuple[int, ...]:
        """The parameters (by place) that are frozen now and may have states: the same ones on all ranks."""
        parameters = self.optimizer.pieces.parameters
        return tuple(place for place in sorted(self.reached) if not parameters[place].requires_grad)

    def loaded(self) -> None:
        """The optimizer has an earlier state."""
        self.is_torn = False
        self.reached.update(range(len(self.optimizer.pieces.parameters)))
        self.optimizer.far.forget()
        if self.interrupted is not None:
            self.interrupted.is_loaded = True

    def goes_on(self) -> bool:
        """Whether a step that a disk has interrupted is to be finished; a collective, if there is one.

        Raises:
            SpillError: it can't be, since something has changed; on all ranks.
        """
        if self.interrupted is None:
            return False
        way, exchange = self.interrupted.way(), self.optimizer.exchange
        most, least = exchange.most(self._numbers([way, -way]), "comparison of what has become of a step").tolist()
        if most == TORN or most != -least:
            raise SpillError(
                "a disk has interrupted the last step, and it can't go on, as gradients, parameters or states of some "
                f"rank are others now: {MEND}"
            )
        if way == ANEW:
            self.interrupted = None
        return way == ON

    def go_on(self) -> Any:
        """Finish a step that a disk has interrupted; returns its loss."""
        assert self.interrupted is not None
        begun, self.interrupted = self.interrupted.begun, None
        self._run(begun)
        return begun.loss

    def run(self, kinds: Sequence[int], kwargs: Group, loss: Any) -> None:
        """Update all parameters of which some rank has a gradient.

        Raises:
            SpillError: the disk of some rank failed; on all ranks.
        """
        self.reached.update(place for place, kind in enumerate(kinds) if kind)
        self._run(StepInProgress(list(kinds), kwargs, loss))

    def _run(self, begun: StepInProgress) -> None:
        used = self.optimizer.averages.used(begun.kinds)
        self.deferred = self.optimizer.awaited.deferred(used)
        self.is_torn, self.failed, self.has_failed = True, None, False
        with self.optimizer.watch.awaited():
            if self.optimizer.is_cut:
                self._by_bucket(used, begun)
            else:
                self._at_once(used, begun)
            self.optimizer.awaited.stepped(used, self.deferred)
        self.optimizer.averages.end()
        self._refuse_failed(begun)
        self.is_torn = False
        if self.is_left:
            self.is_left = False
            message = (
                f"parameters leave the range of {self.optimizer.exchange.wire}, so this step sent them as they are"
            )
            raise ShardError(f"{message}; it is complete, but use wire_dtype=torch.bfloat16 for the next")

    def _refuse_failed(self, begun: StepInProgress) -> None:
        """Raise if the caller's optimizer has failed, or a disk; all ranks have come to the end, and can tell each
        other."""
        error, exchange = self.failed, self.optimizer.exchange
        told = failures(exchange.watch, error, FAILURE) if self.has_failed and exchange.tells else {}
        if told and all(each.startswith(f"{SpillError.__name__}:") for each in told.values()):
            self.optimizer.awaited.gather()  # so that nobody but the step that goes on writes to parameters
            self.is_torn, self.interrupted = False, InterruptedStep(begun, self.optimizer)
            text = f"a disk has failed in the update: {in_words(told)}; a part of the parameters is updated"
            raise SpillError(f"{text}: call step() again on all ranks, which does the rest, or {MEND}") from error
        if error is not None:
            error.add_note(f"some parameters were updated, on this rank and others; {MEND}")
            raise error
        if told:
            text = f"the update has failed on another rank: {in_words(told)}; some parameters were updated, and ranks"
            raise ShardError(f"{text} may differ: {MEND}")

    def _by_bucket(self, used: Sequence[BucketViews], begun: StepInProgress) -> None:
        averages = self.optimizer.averages
        averages.begin()
        late = averages.near is not None or self.optimizer.exchange.wire is torch.float16
        coming: deque[Gradients] = deque()
        going: deque[Callable[[], None]] = deque()
        for turn, laid in enumerate(used):
            coming += map(averages.of, used[turn + len(coming) : turn + 1 + AHEAD])
            self._advance(laid, coming.popleft()(), begun)
            if late or self._is_deferred(laid):
                continue
            going.append(self._gathered(laid))
            if len(going) > AHEAD:
                going.popleft()()
        if late:
            self._gather_all(used)
            return
        going.append(self._telling())
        for wait in going:
            wait()

    def _advance(self, laid: BucketViews, gradients: Sequence[Tensor], begun: StepInProgress) -> None:
        """Update a bucket that is not yet updated, unless something has failed before: then the others go on, and are
        told in the end."""
        number = self.optimizer.pieces.number(laid)
        if self.failed is None and number not in begun.done:
            self._update(laid, gradients, begun.kinds, begun.kwargs)
            if self.failed is None:
                begun.done.add(number)

    def _numbers(self, numbers: Sequence[int]) -> Tensor:
        return self.optimizer.exchange.numbers(numbers, torch.int32, self.optimizer.pieces.device)

    def _at_once(self, used: Sequence[BucketViews], begun: StepInProgress) -> None:
        kwargs, loss = begun.kwargs, begun.loss
        self.optimizer.averages.give(begun.kinds)
        given = [options(group) | {"params": mine["params"]} for group, mine in self._groups()]
        if loss is not None:
            kwargs = {**kwargs, "closure": evaluated_closure(loss)}
        self._step(given, kwargs)
        for (group, _), now in zip(self._groups(), given, strict=True):
            group.update(options(now))
        self._gather_all(used)

    def _gather_all(self, used: Sequence[BucketViews]) -> None:
        """Gather all buckets that are not deferred; exactly, where a rank has numbers that would not survive the
        way."""
        exchange, used = self.optimizer.exchange, [laid for laid in used if not self._is_deferred(laid)]
        if (near := self.optimizer.averages.near) is not None:
            # Others may still read gradients here, if there is nothing to gather.
            failed, end = self.failed is not None, "end of the step"
            self.has_failed = near.gather(used, failed) if used else near.meet(end, failed)
            return
        device = self.optimizer.pieces.device
        left = not exchange.fit(view for laid in used for _, view in laid.own)
        if exchange.wire is torch.float16:
            self.is_left = bool(exchange.most(exchange.numbers([left], torch.int32, device)))
        way = exchange.exact() if self.is_left else exchange
        for wait in [*(way.gather(laid.bucket, laid.views) for laid in used), self._telling()]:
            wait()

    def _telling(self) -> Callable[[], None]:
        """Begin to tell the others whether the caller's optimizer has failed here, behind the last bucket."""
        wait = self.optimizer.exchange.anywhere(self.failed is not None)

        def done() -> None:
            self.has_failed = wait()

        return done

    def _is_deferred(self, laid: BucketViews) -> bool:
        return any(laid is one for one in self.deferred)

    def _groups(self) -> list[tuple[Group, Group]]:
        """Each group, with that of the optimizer that runs on pieces."""
        return list(zip(self.optimizer.param_groups, self.optimizer.inner.param_groups, strict=True))

    def _update(self, laid: BucketViews, gradients: Sequence[Tensor], kinds: Sequence[int], kwargs: Group) -> None:
        """Update the own pieces of a bucket, which are all of one group."""
        optimizer = self.optimizer
        views = assign_grads(laid, gradients, kinds)
        group = optimizer.param_groups[optimizer.group_of[laid.bucket.items[0]]]
        given = options(group) | {"params": views}
        number = optimizer.pieces.number(laid)
        if views and number in optimizer.far.offloaded_owners and not kwargs:
            try:
                optimizer.far.update(number, given)
            except Exception as error:
                self.failed = error
            finally:
                _take(views)
        elif views:
            self._step([given], kwargs)
        group.update(options(given))

    def _step(self, groups: list[Group], kwargs: Group) -> None:
        """Run the caller's own optimizer on these groups; once it has failed, only what others wait for is done."""
        inner = self.optimizer.inner
        before, inner.param_groups = inner.param_groups, groups
        try:
            if self.failed is None:
                unhooked_step(type(inner))(inner, **kwargs)
        except Exception as error:
            self.failed = error
        finally:
            inner.param_groups = before
            for group in groups:
                _take(group["params"])

    def _gathered(self, laid: BucketViews) -> Callable[[], None]:
        return self.optimizer.exchange.gather(laid.bucket, laid.views)


def _take(views: Sequence[Tensor]) -> None:
    """Let go of the gradients."""
    for view in views:
        view.grad = None


def evaluated_closure(loss: Any) -> Callable[[], Any]:
    """A closure that has been evaluated, for an optimizer that does so once."""
    asked = []

    def closure() -> Any:
        asked.append(loss)
        if len(asked) > 1:
            raise ShardError("an optimizer other than LBFGS evaluates its closure twice, which can't be sharded")
        return loss

    return closure
