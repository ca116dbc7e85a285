"""What the backward of a compiled module leaves of gradients: this rank's part of each mean, and ghosts in `.grad`.

loss.backward()      ->   inside.parts[0]: 1/N of bucket 0, averaged;  w.grad: a ghost, NaN wherever it is read
optimizer.step()          takes the parts of those whose ghost is still there
zero_grad(), w.grad = None ...   takes the ghost away, or makes it 0, and the part is as good as gone
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from passes.ir.wire import WORKSPACE
from passes.shards import Bucket, Piece

from ..errors import ShardError
from ..guards.signature import has_hooks
from .comm import shared_memory
from .grad_presence import DENSE, PARTS
from .shards.placeholder_grads import is_placeholder, is_written, placeholder_grad
from .shards.shard_views import BucketViews

if TYPE_CHECKING:
    from .optimizer import OSS

MEETING = 64  # bytes for each rank, where ranks meet


@dataclass(frozen=True)
class Stretch:
    """Elements [begin, end) of the gradient of a parameter, `at` elements from the begin of a bucket."""

    name: str
    begin: int
    end: int
    at: int


@dataclass(frozen=True)
class GradBucket:
    """What ranks exchange together: `size` elements, of which this rank is to have `part`; `room` bytes are taken
    meanwhile for what comes."""

    bucket: int
    stretches: tuple[Stretch, ...]
    size: int
    part: int
    room: int = 0


class ShardedGradients:
    """This rank's parts of the means of one optimizer's gradients, which wait for its step."""

    def __init__(self, optimizer: OSS) -> None:
        self.optimizer = optimizer
        self.shards: dict[int, Tensor] = {}  # of each bucket
        self.placeholders: dict[Tensor, Tensor] = {}
        self.kinds: Sequence[int] = ()  # of the gradients of each parameter, on whatever rank has most of it
        self.takers: list[Tensor] = []  # the parameters of the backward that runs, or ran last

    def grad_buckets(self, named: Mapping[str, Tensor]) -> list[GradBucket]:
        """What backward may exchange for the parameters of these names: nothing, where somebody is told of gradients,
        or where they are the same on all ranks."""
        oss = self.optimizer
        oss.refresh_views()
        # What float16 can't take is refused in the step, before anything is sent.
        plain = oss.comm.is_alone or oss.gradients == "same" or oss.comm.wire is torch.float16
        if plain or any(map(has_hooks, oss.layout.parameters)):
            return []
        names = {parameter: name for name, parameter in named.items()}
        found = []
        for i, laid in enumerate(oss.layout.buckets):
            bucket, ranks = laid.bucket, oss.comm.ranks
            if bucket.owner is None and bucket.part:
                stretches = tuple(
                    Stretch(names.get(oss.layout.parameters[one.item], ""), one.begin, one.end, one.at)
                    for one in _stretches_of(bucket, ranks)
                )
                room = _room_nbytes(oss, bucket.part, oss.layout.parameters[bucket.items[0]])
                found.append(GradBucket(i, stretches, bucket.part * ranks, bucket.part, room))
        return found

    def begin_backward(self, takers: Mapping[str, Tensor | None]) -> GradReduction:
        """What sums gradients in the backward that begins now; `takers` are the parameters whose they are.

        Raises:
            ShardError: they are wanted elsewhere, or have to be added to what is no mean over ranks. Nothing has
                changed.
        """
        self.optimizer.refresh_views()
        self.drop_cleared()
        for name, taker in takers.items():
            if taker is None:
                raise ShardError(
                    f"the gradient of {name} is wanted elsewhere, by torch.autograd.grad, backward(inputs=...) or a "
                    "hook, or was frozen since forward, and backward averages it over the ranks: do without, or "
                    "compile without optimizer="
                )
            if taker.grad is not None and not is_placeholder(taker.grad):
                raise ShardError(
                    f"{name} has a gradient from outside of the compiled module, to which backward can't add what it "
                    "averages over the ranks: call optimizer.zero_grad() before"
                )
        self.takers = [taker for taker in takers.values() if taker is not None]
        return GradReduction(self.optimizer)

    def add_shards(self, shards: Mapping[int, Tensor]) -> None:
        """Backward has ended, and these are this rank's parts."""
        for bucket, part in shards.items():
            there = self.shards.setdefault(bucket, part)
            if there is not part:
                there.add_(part)
        for parameter in self.takers:
            if parameter not in self.placeholders:
                parameter.grad = self.placeholders[parameter] = placeholder_grad(parameter)

    def averaged(self, laid: BucketViews) -> Callable[[], list[Tensor]] | None:
        """What waits for the mean gradients of the own pieces of a bucket, if backward has averaged some of them."""
        kinds = [self.kinds[item] for item in laid.bucket.items]
        if PARTS not in kinds:
            return None
        oss = self.optimizer
        part = self.shards.get(oss.layout.number(laid))
        own = laid.stretches[oss.comm.rank]
        first = oss.comm.rank * laid.bucket.part
        if part is None:  # no gradient is there on this rank, but on others
            part = oss.layout.parameters[laid.bucket.items[0]].detach().new_zeros(laid.bucket.part)
        mine = [part[one.at - first : one.at - first + one.count] for one in own]
        if max(kinds) < DENSE:
            return lambda: laid.gradients(mine)
        wait = oss.comm.reduce(laid.bucket, oss.layout.sources(laid, {}))
        return lambda: laid.gradients([more.add(one) for more, one in zip(wait(), mine, strict=True)])

    def drop_cleared(self) -> None:
        """Take note of the gradients that somebody has set to None, or to zero.

        Raises:
            ShardError: something else than zeros was written to one.
        """
        gone = {parameter for parameter, one in self.placeholders.items() if parameter.grad is not one}
        written = {
            parameter for parameter, one in self.placeholders.items() if parameter not in gone and is_written(one)
        }
        for parameter in written:
            if self.placeholders[parameter].ne(0).any():
                raise ShardError(
                    f"the gradient of a parameter of shape {list(parameter.shape)} was changed, but lies in parts on "
                    "all ranks: clip with the optimizer's own clip_grad_norm_, or compile without optimizer="
                )
            parameter.grad = self.placeholders[parameter] = placeholder_grad(parameter)
        for parameter in gone:
            del self.placeholders[parameter]
        if gone or written:
            self._zero(gone | written)

    def refuse_parts(self) -> None:
        """
        Raises:
            ShardError: parts are there, of a layout that is about to go.
        """
        self.drop_cleared()
        if self.shards:
            raise ShardError(
                "parameters have become others, and gradients of the old ones are there: call zero_grad() before"
            )

    def _zero(self, parameters: set[Tensor]) -> None:
        pieces = self.optimizer.layout
        items = {i for i, parameter in enumerate(pieces.parameters) if parameter in parameters}
        for i, part in list(self.shards.items()):
            bucket = pieces.buckets[i].bucket
            if not any(pieces.parameters[item] in self.placeholders for item in bucket.items):
                del self.shards[i]
                continue
            for one in pieces.buckets[i].stretches[pieces.rank]:
                if one.item in items:
                    first = one.at - pieces.rank * bucket.part
                    part[first : first + one.count].zero_()


class GradReduction:
    """The means of one backward; see `memgraph.graph.ops.Exchange`."""

    def __init__(self, optimizer: OSS) -> None:
        self.optimizer, self.shared_memory = optimizer, optimizer.reachable_ranks
        self.begun: dict[int, Callable[[], Tensor]] = {}

    def begin(self, bucket: int, sent: Tensor) -> None:
        self.begun[bucket] = self.averaged(self.optimizer.layout.buckets[bucket].bucket, sent)

    def averaged(self, bucket: Bucket, sent: Tensor) -> Callable[[], Tensor]:
        """Begin to average what lies as a bucket does; what waits for this rank's part of it."""
        way = (
            self.shared_memory
            if self.shared_memory is not None and sent.nbytes >= shared_memory.LEAST
            else self.optimizer.comm
        )
        return way.packed(bucket, sent)

    def end(self, bucket: int) -> Tensor:
        return self.begun.pop(bucket)()


def _stretches_of(bucket: Bucket, ranks: int) -> list[Piece]:
    """What lies in a bucket, joined where one piece goes on where another ends, whoever's it is."""
    found: list[Piece] = []
    for one in (one for rank in range(ranks) for one in bucket.stretches(rank)):
        if found and found[-1].item == one.item:
            found[-1] = Piece(one.item, found[-1].begin, one.end, found[-1].rank, found[-1].at)
        else:
            found.append(one)
    return found


def _room_nbytes(oss: OSS, part: int, like: Tensor) -> int:
    """What an exchange takes besides what is sent and this rank's part of the mean.

    On the CPU, what comes of each other rank, in one of which the mean is made; with a cast all of that, what is sent,
    and what one of them is cast back to.
    """
    others = oss.comm.ranks - 1
    wire = oss.comm.wire
    if like.device.type != "cpu":
        return 0 if dist.get_backend(oss.comm.group) == "nccl" else (others + 1) * part * like.element_size()
    if wire is None or like.element_size() <= wire.itemsize:
        return (others - 1) * part * like.element_size() + MEETING * (others + 1)
    return 2 * others * part * wire.itemsize + part * like.element_size() + WORKSPACE
