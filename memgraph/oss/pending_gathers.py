"""What other ranks have updated of the parameters and has not come here yet, if that is left to the next forward.

    optimizer.step()     w: f32[8] on rank 0 of 2     ->   4 updated numbers | NaN in 4 places, awaited
    model(x)             its graph gathers w before it reads it
    optimizer.gather()   gathers everything now: before anybody else reads a parameter

Ranks await the same buckets: what makes them awaited, and what gathers them, are calls that all make.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import ShardError
from ..tensors.layout import has_storage
from .comm.consensus import GATHER, check_same_step
from .comm.exchange import op_name
from .shards.shard_views import BucketViews

if TYPE_CHECKING:
    from ..graph.captured import Captured
    from .optimizer import OSS

AHEAD = 2  # buckets that are on their way at once, when nothing else goes on
ADVICE = "call optimizer.gather() before, on all ranks"


class PendingGathers:
    """The buckets of one optimizer that lack something here."""

    def __init__(self, optimizer: OSS) -> None:
        self.optimizer = optimizer
        self.buckets: set[int] = set()
        self.ever: set[int] = set()  # those that have been among them
        self.able: set[int] = set()  # those that a forward since the last step gathers, and so will the next

    @property
    def frozen_buckets(self) -> tuple[int, ...]:
        """The buckets that may be awaited, although nothing in them is trained now."""
        return tuple(i for i in sorted(self.ever) if not self.is_trained(i))

    def is_trained(self, bucket: int) -> bool:
        """Whether a step may update it."""
        pieces = self.optimizer.layout
        return any(pieces.parameters[item].requires_grad for item in pieces.buckets[bucket].bucket.items)

    def deferred(self, used: Iterable[BucketViews]) -> list[BucketViews]:
        """The buckets of a step that begins now which the next forward will gather."""
        able, self.able = self.able, set()
        laid = self.optimizer.layout.buckets
        wanted = {id(laid[i]) for i in able}
        return [one for one in used if id(one) in wanted]

    def stepped(self, used: Collection[BucketViews], deferred: Collection[BucketViews]) -> None:
        """A step has updated the own ranges of these, and gathered all but those that are deferred."""
        number = {id(laid): i for i, laid in enumerate(self.optimizer.layout.buckets)}
        self.buckets -= {number[id(laid)] for laid in used}
        self.buckets |= {number[id(laid)] for laid in deferred}
        self.ever |= self.buckets
        rank = self.optimizer.comm.rank
        for laid in deferred:
            for view in (view for other, views in enumerate(laid.views) if other != rank for view in views):
                if view.is_floating_point() or view.is_complex():
                    view.fill_(torch.nan)

    def gather(self) -> None:
        """Gather all of it, if anything is awaited; a collective."""
        if self.buckets:
            with torch.no_grad():
                self.optimizer.refresh_views()
                check_same_step(self.optimizer.comm, self.optimizer.layout.device, GATHER)()
                coming = ForwardGather(self, self.buckets)
                coming.open()
                coming.all()

    def gather_for_capture(self, parameters: Iterable[Tensor]) -> None:
        """A call that reads these is about to be planned, for which it may be tried with their numbers: what ranks plan
        together they gather together.

        Raises:
            ShardError: it has no backward, so that this rank plans alone, and something is awaited.
        """
        read = list(parameters)
        if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in read):
            self.optimizer.gather()
        self.refuse_reads(read, "this call")

    def begin_forward(self, captured: Captured, tensors: Sequence[Tensor]) -> ForwardGather | None:
        """What gathers in a forward of these tensors; None if nothing is awaited.

        Raises:
            ShardError: it reads more that is awaited than it gathers.
        """
        self.able |= captured.gathers
        if not self.buckets:
            return None
        self.refuse_reads(tensors, "this call", self.buckets - captured.gathers)
        if not (left := self.buckets & captured.gathers):
            return None
        self.optimizer.refresh_views()
        return ForwardGather(self, left, early=self._is_read_as_another(captured, tensors))

    def _is_read_as_another(self, captured: Captured, tensors: Sequence[Tensor]) -> bool:
        """Whether a forward reads the memory of a parameter as that of something else, of which its graph does not know
        when."""
        parameters = self.optimizer.layout.parameters
        owned, known = {one.untyped_storage()._cdata for one in parameters}, set(map(id, parameters))
        inputs = zip(captured.inputs, tensors, strict=False)
        others = [one for role, one in inputs if role.kind != "parameter" or id(one) not in known]
        for node in captured.graph.graph.find_nodes(op="get_attr"):
            constant = attrgetter(str(node.target))(captured.graph)
            others += [constant] if isinstance(constant, Tensor) else []
        return any(has_storage(one) and one.untyped_storage()._cdata in owned for one in others)

    def refuse_reads(self, tensors: Iterable[Tensor], what: str, buckets: Iterable[int] | None = None) -> None:
        """
        Raises:
            ShardError: some of these tensors are parameters that are awaited, of these buckets if any are named.
        """
        oss, there = self.optimizer, set(map(id, tensors)) if self.buckets else set()
        lacking = (oss.layout.buckets[i].bucket for i in (self.buckets if buckets is None else buckets))
        if items := [i for one in lacking for i in one.items if id(oss.layout.parameters[i]) in there]:
            raise ShardError(
                f"{what} reads {op_name(items)}, of which other ranks have ranges that the last step has updated, and "
                f"that are NaN here: {ADVICE}"
            )

    def reset(self) -> None:
        """The buckets are about to become others.

        Raises:
            ShardError: some are awaited.
        """
        if self.buckets:
            raise ShardError(f"parameters have become others while ranges of them were on other ranks: {ADVICE}")
        self.ever, self.able = set(), set()


class ForwardGather:
    """The gathers of one forward; see `memgraph.graph.ops.Gather`."""

    def __init__(self, awaited: PendingGathers, buckets: Iterable[int], early: bool = False) -> None:
        self.pending_gathers, self.left, self.early = awaited, set(buckets), early
        self.shared_memory = awaited.optimizer.reachable_ranks
        self.begun: dict[int, Callable[[], None]] = {}

    def open(self) -> None:
        """All ranks are here, and have ended their step."""
        if self.shared_memory is not None:
            self.shared_memory.open({}, self.pending_gathers.optimizer.layout.parameters)
        if self.early:
            self.all()

    def all(self) -> None:
        """Gather everything before anything else goes on."""
        for bucket in sorted(self.left):
            self.begin(bucket)
            if len(self.begun) > AHEAD:
                self.end(min(self.begun))
        for bucket in sorted(self.begun):
            self.end(bucket)

    def begin(self, bucket: int) -> None:
        if bucket in self.left:
            oss = self.pending_gathers.optimizer
            laid = oss.layout.buckets[bucket]
            near = self.shared_memory
            self.begun[bucket] = (
                oss.comm.gather(laid.bucket, laid.views) if near is None else lambda: near.fetch([laid])
            )

    def end(self, bucket: int) -> None:
        if bucket not in self.begun:
            return
        wait, others, self.begun = self.begun.pop(bucket), self.begun, {}
        wait()
        self.begun = others  # for which nobody waits, if this has failed
        self.left.discard(bucket)
        self.pending_gathers.buckets.discard(bucket)
        if self.shared_memory is not None and not self.left:
            self.shared_memory.meet("end of the gathering")  # before anybody changes what others read

    def close(self) -> None:
        """Forward has failed: what is on its way is waited for, as it lands in the parameters."""
        for bucket in sorted(self.begun):
            self.end(bucket)
