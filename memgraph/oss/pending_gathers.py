"""Updated parameters that the next forward of a compiled module gathers.

    optimizer.step()     w: f32[8] on rank 0 of 2     ->   4 updated numbers | NaN in 4 places, pending
    model(x)             its graph gathers w before it reads it
    optimizer.gather()   gathers all pending buckets, before other code reads a parameter

All ranks have the same pending buckets, since all make the same calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import ShardError
from ..tensors.layout import has_storage
from .comm.collectives import op_name
from .comm.consensus import GATHER, check_same_step
from .comm.exchange import BucketComm
from .shards.layout import ShardLayout
from .shards.shard_views import BucketViews

if TYPE_CHECKING:
    from ..graph.captured import Captured

AHEAD = 2  # buckets that are sent at once when nothing is computed meanwhile
ADVICE = "call optimizer.gather() before, on all ranks"


class PendingGathers:
    """The pending buckets of one optimizer, by number. `refresh` renews the views of the layout."""

    def __init__(self, layout: ShardLayout, comm: BucketComm, refresh: Callable[[], None]) -> None:
        self.layout, self.comm, self.refresh = layout, comm, refresh
        self.buckets: set[int] = set()
        self.ever: set[int] = set()  # buckets that have been pending before
        self.by_forward: set[int] = set()  # buckets that a forward since the last step gathers

    @property
    def frozen_buckets(self) -> tuple[int, ...]:
        """Buckets that may be pending although nothing in them is trained now."""
        return tuple(i for i in sorted(self.ever) if not self.layout.is_trained(self.layout.buckets[i]))

    def defer(self, used: Iterable[BucketViews]) -> set[int]:
        """Return which of the buckets of a step that begins the next forward will gather."""
        by_forward, self.by_forward = self.by_forward, set()
        return {bucket.number for bucket in used} & by_forward

    def note_step(self, used: Iterable[BucketViews], deferred: set[int]) -> None:
        """Note that a step has updated these buckets, and gathered all but the deferred ones."""
        self.buckets = self.buckets - {bucket.number for bucket in used} | deferred
        self.ever |= self.buckets
        for bucket in (self.layout.buckets[number] for number in deferred):
            for rank, views in enumerate(bucket.views):
                for view in views if rank != self.layout.rank else ():
                    if view.is_floating_point() or view.is_complex():
                        view.fill_(torch.nan)

    def gather(self) -> None:
        """Gather all pending buckets; a collective if there are any."""
        if self.buckets:
            with torch.no_grad():
                self.refresh()
                check_same_step(self.comm, GATHER)()
                gather = ForwardGather(self, self.buckets)
                gather.open()
                gather.all()

    def gather_for_capture(self, parameters: Iterable[Tensor]) -> None:
        """Gather before a call that reads these is planned, as planning may run it with their values."""
        read = list(parameters)
        if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in read):
            self.gather()
        self.refuse_reads(read, "this call")

    def begin_forward(self, captured: Captured, tensors: Sequence[Tensor]) -> ForwardGather | None:
        """Return the gathers of a forward of these tensors; None if no bucket is pending."""
        self.by_forward |= captured.gathers
        if not self.buckets:
            return None
        self.refuse_reads(tensors, "this call", self.buckets - captured.gathers)
        if not (buckets := self.buckets & captured.gathers):
            return None
        self.refresh()
        return ForwardGather(self, buckets, early=self._has_aliases(captured, tensors))

    def _has_aliases(self, captured: Captured, tensors: Sequence[Tensor]) -> bool:
        """Return True if forward reads a parameter's memory through another tensor, which its graph does not order."""
        parameters = self.layout.parameters
        storages, ids = {p.untyped_storage()._cdata for p in parameters}, set(map(id, parameters))
        inputs = zip(captured.inputs, tensors, strict=False)
        others = [tensor for role, tensor in inputs if role.kind != "parameter" or id(tensor) not in ids]
        for node in captured.graph.graph.find_nodes(op="get_attr"):
            constant = attrgetter(str(node.target))(captured.graph)
            others += [constant] if isinstance(constant, Tensor) else []
        return any(has_storage(other) and other.untyped_storage()._cdata in storages for other in others)

    def refuse_reads(self, tensors: Iterable[Tensor], call: str, buckets: Iterable[int] | None = None) -> None:
        ids = set(map(id, tensors)) if self.buckets else set()
        pending = [self.layout.buckets[i].bucket for i in (self.buckets if buckets is None else buckets)]
        if items := [i for bucket in pending for i in bucket.params if id(self.layout.parameters[i]) in ids]:
            raise ShardError(
                f"{call} reads {op_name(items)}, but other ranks have updated ranges of them that are NaN here: "
                f"{ADVICE}"
            )

    def reset(self) -> None:
        if self.buckets:
            raise ShardError(f"parameters were replaced while ranges of them were on other ranks: {ADVICE}")
        self.ever, self.by_forward = set(), set()


class ForwardGather:
    """The gathers of one forward; see `memgraph.graph.ops.Gather`. `early`: all buckets are gathered before it runs."""

    def __init__(self, pending: PendingGathers, buckets: Iterable[int], early: bool = False) -> None:
        self.pending, self.left, self.early = pending, set(buckets), early
        self.layout, self.comm = pending.layout, pending.comm
        self.shared_memory = self.comm.shared_memory if self.layout.is_dense_on_cpu else None
        self.started: dict[int, Callable[[], None]] = {}

    def open(self) -> None:
        """Begin, when all ranks are known to have ended their step."""
        if self.shared_memory is not None:
            self.shared_memory.share_addresses({}, self.layout.parameters)
        if self.early:
            self.all()

    def all(self) -> None:
        for bucket in sorted(self.left):
            self.begin(bucket)
            if len(self.started) > AHEAD:
                self.end(min(self.started))
        self.close()

    def begin(self, bucket: int) -> None:
        if bucket not in self.left:
            return
        views, reader = self.layout.buckets[bucket], self.shared_memory
        if reader is None:
            self.started[bucket] = self.comm.gather(views.bucket, views.views)
        else:
            self.started[bucket] = lambda: reader.read_parameters([views])

    def end(self, bucket: int) -> None:
        if bucket not in self.started:
            return
        wait, others, self.started = self.started.pop(bucket), self.started, {}
        wait()
        self.started = others  # if waiting has failed, `close` waits for no other
        self.left.discard(bucket)
        self.pending.buckets.discard(bucket)
        if self.shared_memory is not None and not self.left:
            self.shared_memory.meet("end of the gathering")  # no rank may change what others still read

    def close(self) -> None:
        """Wait for all that has begun, also if forward has failed: parameters are being written."""
        for bucket in sorted(self.started):
            self.end(bucket)
