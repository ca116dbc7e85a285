"""Ranks that hold other parts of the same parameters, as with tensor parallelism.

rank 0: w[:, :4], whole bias, norms [3.0, 1.0]     rank 1: w[:, 4:], whole bias, norms [4.0, 1.0]
->  [[3.0, 1.0], [4.0, 1.0]] on both; the bias counts once
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import AgreementError
from .rank_group import RankGroup
from .watchdog import CollectiveWatchdog

_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, RankGroup] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class ModelParallel:
    """A group of such ranks; `replicated` are the ids of parameters that are whole on each of them."""

    ranks: RankGroup
    replicated: frozenset[int]

    @classmethod
    def of(cls, group: dist.ProcessGroup, replicated: Sequence[Tensor], parameters: Sequence[Tensor]) -> ModelParallel:
        ids = frozenset(map(id, replicated))
        if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
            raise ValueError("group= is no process group that this rank is in; give that of its tensor parallelism")
        if not ids <= set(map(id, parameters)):
            raise ValueError("replicated= has a tensor that is no parameter of this optimizer; give its own")
        if group not in _groups:
            _groups[group] = RankGroup(CollectiveWatchdog(group))
        return cls(_groups[group], ids)

    def is_replicated(self, parameter: Tensor) -> bool:
        return id(parameter) in self.replicated

    def all_norms(self, norms: Sequence[Tensor]) -> Tensor:
        """Return the norms of each rank's parts, one row for each rank; a collective."""
        name = "exchange of the norms of parts of parameters"
        counts = self._all_gather(torch.tensor([len(norms)]), name).flatten().tolist()
        if len(set(counts)) > 1:
            raise AgreementError(
                f"ranks {self.ranks.watchdog.members} have gradients of {counts} parameters: a norm over group= needs "
                "parts of the same ones on all of them; nothing was scaled"
            )
        return self._all_gather(torch.stack(list(norms)).double() if norms else torch.zeros(0).double(), name)

    def _all_gather(self, own: Tensor, name: str) -> Tensor:
        if self.ranks.is_alone:
            return own[None]
        return self.ranks.start_all_gather(own.to(self.ranks.watchdog.device), name)().to(own.device)


def replicated_tensors(replicated: object) -> list[Tensor]:
    is_list = isinstance(replicated, Iterable) and not isinstance(replicated, Tensor)
    tensors: list[Any] = [*replicated] if is_list else [replicated]  # type: ignore[misc]
    if not is_list or not all(isinstance(each, Tensor) for each in tensors):
        advice = "give a list of the parameters that are whole on each rank of group="
        raise TypeError(f"replicated is {replicated!r:.100}; {advice}")
    return tensors
