"""Gather the state that the plain optimizer would have, and cut one into shards.

    rank 0: exp_avg of w[0:6]     rank 1: exp_avg of w[6:7], of b, of v
    ->  {0: {"step": 1.0, "exp_avg": f32[7]}, 1: ..., 2: ...} on rank 0, in host memory

Outlines are exchanged first, as text. Then each tensor goes from its owners to the recipient, one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from passes.shards import ShardRange

from ...errors import StateError
from ...tensors.layout import flat, is_dense
from ..comm.watchdog import CollectiveWatchdog
from ..shards.shard_views import in_order_of
from .own_state import Entries, Key, OwnState, copied, key
from .state_outline import Kind, Outline, fill_outline, kinds, tensors


def gather_state(own: OwnState, to: int | None, incomplete: bool) -> dict[int, Entries] | None:
    """Gather the state of each parameter that has one, by its index; a collective."""
    entries = own.entries()
    outlines, sender = own.outlines(entries, incomplete), TensorSender(own.watchdog, to)
    state: dict[int, Entries] = {}
    for item, shards in enumerate(own.layout.shards_by_parameter()):
        if any(key(shard) in outlines for shard in shards):
            gather = _ParameterGather(sender, entries, outlines, shards, own.layout.parameters[item])
            state[item] = gather.run()
    return state if sender.is_recipient else None


def cut_state(own: OwnState, state: Mapping[int, Entries]) -> dict[Key, Entries]:
    """Copy what this rank's shards have of the state of whole parameters."""
    cut: dict[Key, Entries] = {}
    for item, shards in enumerate(own.layout.shards_by_parameter()):
        for shard in shards if item in state else ():
            if shard.rank == own.rank:
                splits, parameter = own.optimizer.splits, own.layout.parameters[item]
                values = {name: _densified(value) if splits else value for name, value in state[item].items()}
                whole = len(shards) == 1
                cut[key(shard)] = {
                    name: copied(value) if whole else _part(value, parameter, shard) for name, value in values.items()
                }
    return cut


def _densified(value: Any) -> Any:
    """Densify momentum of sparse gradients: `OSS` densifies those gradients."""
    return value.to_dense() if isinstance(value, Tensor) and value.is_sparse else value


def _part(value: Any, parameter: Tensor, shard: ShardRange) -> Any:
    if isinstance(value, Tensor) and value.shape == parameter.shape:
        return in_order_of(value, parameter)[shard.begin : shard.end].clone()
    return copied(value)


def has_shard_shape(given: Outline, shard: ShardRange) -> bool:
    """Return True if an entry of a shard of a split parameter has one element for each of the shard's."""
    return "tensor" in given and any(kind.shape == (shard.count,) for kind in kinds(given))


@dataclass(frozen=True)
class _ParameterGather:
    """The gathering of the state of one parameter."""

    sender: TensorSender
    entries: Mapping[Key, Entries]  # of this rank's shards
    outlines: Mapping[Key, Outline]  # of all ranks' shards
    shards: Sequence[ShardRange]
    parameter: Tensor

    @property
    def name(self) -> str:
        return f"gathering of the state of parameter {self.shards[0].param}"

    def run(self) -> Entries:
        """Return a copy of the state on recipients, placeholders on other ranks."""
        given = self.outlines.get(key(self.shards[0]))
        if given is None or any(key(shard) not in self.outlines for shard in self.shards):
            raise StateError(f"the {self.name} failed: some of its elements have a state and some have none")
        return {name: self._entry(name, each) for name, each in given["dict"]}

    def _entry(self, name: str, given: Outline) -> Any:
        first = self.shards[0]
        if len(self.shards) > 1 and isinstance(given, dict) and has_shard_shape(given, first):
            return self._joined(name, next(kinds(given)))
        own = list(tensors(self.entries[key(first)][name])) if key(first) in self.entries else []
        gathered: list[Tensor] = []
        for place, kind in enumerate(kinds(given)):
            target = kind.empty() if self.sender.is_recipient else None
            self.sender.send(first.rank, own[place] if own else None, target, self.name)
            gathered.append(torch.empty(0) if target is None else target)
        return fill_outline(given, iter(gathered))

    def _joined(self, name: str, kind: Kind) -> Tensor:
        whole = None
        if self.sender.is_recipient:
            whole = torch.empty_like(self.parameter, dtype=kind.dtype, device="cpu", requires_grad=False)
        for shard in self.shards:
            source = self.entries[key(shard)][name] if key(shard) in self.entries else None
            target = None if whole is None else flat(whole)[shard.begin : shard.end]
            self.sender.send(shard.rank, source, target, self.name)
        return torch.empty(0) if whole is None else whole


class TensorSender:
    """Sends tensors to the rank `to`, or to all ranks if it is None, through host memory."""

    def __init__(self, watchdog: CollectiveWatchdog, to: int | None) -> None:
        self.watchdog, self.to, self.rank = watchdog, to, watchdog.group.rank()

    @property
    def is_recipient(self) -> bool:
        return self.to is None or self.to == self.rank

    def send(self, rank: int, source: Tensor | None, target: Tensor | None, name: str) -> None:
        """Copy `source` of `rank` into `target` of the recipients; all ranks call this. Targets have no gaps."""
        if self.rank == rank and self.is_recipient:
            assert source is not None and target is not None
            flat(target).copy_(flat(_without_gaps(source)))
        if (source is None and target is None) or self.to == rank or len(self.watchdog.members) == 1:
            return
        with self.watchdog.naming(name):
            if self.rank == rank:
                assert source is not None
                self._send(flat(_without_gaps(source)).view(torch.uint8).to(self.watchdog.device), rank)
            else:
                assert target is not None
                self._receive(flat(target).view(torch.uint8), rank)

    def _send(self, message: Tensor, rank: int) -> None:
        if message.numel():
            self._transfer(message, rank, dist.isend, group_dst=self.to)

    def _receive(self, target: Tensor, rank: int) -> None:
        if target.numel():
            device = self.watchdog.device
            message = target if target.device == device else torch.empty_like(target, device=device)
            self._transfer(message, rank, dist.irecv, group_src=rank)
            if message is not target:
                target.copy_(message)

    def _transfer(self, message: Tensor, rank: int, single: Any, **peer: int | None) -> None:
        group = self.watchdog.group
        if self.to is None:
            self.watchdog.wait(dist.broadcast(message, group=group, group_src=rank, async_op=True))
        else:
            self.watchdog.wait(single(message, group=group, **peer))


def _without_gaps(tensor: Tensor) -> Tensor:
    return tensor.detach() if is_dense(tensor) else torch.empty_like(tensor).copy_(tensor.detach())
