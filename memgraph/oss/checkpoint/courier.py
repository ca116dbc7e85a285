"""Bring a tensor from the rank that has it to the one who asked, or to all, through host memory.

courier = Courier(watchdog, to=0)
courier.bring(2, source, target, name)   # on all ranks; read on rank 2, written on rank 0
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ...tensors.layout import flat, is_dense
from ..comm.watchdog import CollectiveWatchdog


class TensorSender:
    """Between the ranks of a group; `to` is a place in it, None for all of them."""

    def __init__(self, watchdog: CollectiveWatchdog, to: int | None) -> None:
        self.watchdog, self.to, self.me = watchdog, to, watchdog.group.rank()

    @property
    def is_recipient(self) -> bool:
        return self.to is None or self.to == self.me

    def bring(self, rank: int, source: Tensor | None, target: Tensor | None, name: str) -> None:
        """Bits as they lie in memory: the tensors are alike, and the target has no gaps."""
        if self.me == rank and self.is_recipient:
            assert source is not None and target is not None
            flat(target).copy_(flat(_dense(source)))
        if (source is None and target is None) or self.to == rank or len(self.watchdog.members) == 1:
            return
        with self.watchdog.naming(name):
            if self.me == rank:
                assert source is not None
                self._send(_bytes(_dense(source)).to(self.watchdog.device), rank)
            else:
                assert target is not None
                self._receive(_bytes(target), rank)

    def _send(self, message: Tensor, rank: int) -> None:
        if not message.numel():
            return
        if self.to is None:
            self.watchdog.wait(dist.broadcast(message, group=self.watchdog.group, group_src=rank, async_op=True))
        else:
            self.watchdog.wait(dist.isend(message, group=self.watchdog.group, group_dst=self.to))

    def _receive(self, target: Tensor, rank: int) -> None:
        if not target.numel():
            return
        message = (
            target if target.device == self.watchdog.device else torch.empty_like(target, device=self.watchdog.device)
        )
        if self.to is None:
            self.watchdog.wait(dist.broadcast(message, group=self.watchdog.group, group_src=rank, async_op=True))
        else:
            self.watchdog.wait(dist.irecv(message, group=self.watchdog.group, group_src=rank))
        if message is not target:
            target.copy_(message)


def _dense(tensor: Tensor) -> Tensor:
    return tensor.detach() if is_dense(tensor) else torch.empty_like(tensor).copy_(tensor.detach())


def _bytes(tensor: Tensor) -> Tensor:
    return flat(tensor).view(torch.uint8)
