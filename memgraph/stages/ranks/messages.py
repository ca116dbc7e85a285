"""Values between stages, each sent as the run of memory that it fills, so that its strides are kept.

    sender: float32[2, 3] with strides (1, 2)    ->    24 bytes    ->    receiver: float32[2, 3] with strides (1, 2)

Both sides know shapes and strides from the captured step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .stage_group import StageGroup

TAG = 9  # of messages between stages; sharded optimizers use smaller ones
Work = tuple[dist.Work, Tensor]  # the tensor has to stay alive until the message has arrived


@dataclass(frozen=True, eq=False)
class Message:
    """A value that one stage sends to another; `fake` has its layout. Stage k is on rank k % ranks."""

    name: str
    fake: Tensor
    sender: int
    receiver: int

    @property
    def nbytes(self) -> int:
        return _span(self.fake) * self.fake.element_size()

    @property
    def tag(self) -> int:
        """The same for all messages between two stages; they are received in the order in which they are sent."""
        return TAG + (self.sender << 12) + self.receiver


@dataclass(frozen=True, eq=False)
class Receipt:
    """Values that have been asked for."""

    group: StageGroup
    values: dict[str, Tensor]
    works: list[dist.Work | None]

    def wait(self) -> dict[str, Tensor]:
        """Return the values once they have come."""
        with self.group.naming("receiving of values from a stage"):
            for work in self.works:
                self.group.wait(work)
        return self.values


def send(group: StageGroup, messages: Iterable[tuple[Message, Tensor]]) -> list[Work]:
    """Start to send values."""
    works: list[Work] = []
    with group.naming("sending of values to a stage"):
        for message, value in messages:
            sent = _bytes(message.fake, with_layout(message.fake, value))
            if message.nbytes:
                receiver = message.receiver % group.ranks
                work = dist.isend(sent, group=group.group, group_dst=receiver, tag=message.tag)
                assert work is not None
                works.append((work, sent))
    return works


def receive(group: StageGroup, messages: Sequence[Message], here: Mapping[Message, Tensor] | None = None) -> Receipt:
    """Ask for values; those of stages on the same rank are `here`."""
    known = here or {}
    values = {message.name: known[message] if message in known else _empty(message.fake) for message in messages}
    with group.naming("receiving of values from a stage"):
        works = [
            dist.irecv(
                _bytes(message.fake, values[message.name]), group=group.group,
                group_src=message.sender % group.ranks, tag=message.tag,
            )
            for message in messages
            if message.nbytes and message not in known
        ]  # fmt: skip
    return Receipt(group, values, works)


def wait_for(group: StageGroup, works: list[Work]) -> None:
    """Wait until values have been received, and let go of them."""
    with group.naming("sending of values to a stage"):
        for work, _ in works:
            group.wait(work)
    works.clear()


def with_layout(fake: Tensor, value: Tensor) -> Tensor:
    """Return the value with the strides that it has in the captured step."""
    return value if value.stride() == fake.stride() else _empty(fake).copy_(value)


def _span(fake: Tensor) -> int:
    """Return the elements between the first and the last of a tensor, both included."""
    if fake.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(fake.shape, fake.stride(), strict=True))


def _empty(fake: Tensor) -> Tensor:
    flat = torch.empty(_span(fake), dtype=fake.dtype, device=fake.device)
    return flat.as_strided(fake.shape, fake.stride())


def _bytes(fake: Tensor, value: Tensor) -> Tensor:
    """Return the run of memory that a value fills, as bytes: no backend sends all dtypes."""
    return value.detach().as_strided((_span(fake),), (1,)).view(torch.uint8)
