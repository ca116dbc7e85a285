"""The ranks that have the other parts of the same parameters, as with tensor parallelism.

rank 0: w[:, :4], whole bias, norms [3.0, 1.0]     rank 1: w[:, 4:], whole bias, norms [4.0, 1.0]
->  [[3.0, 1.0], [4.0, 1.0]] on both, of which the bias counts once
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
from .watchdog import CollectiveWatchdog

_watches: weakref.WeakKeyDictionary[dist.ProcessGroup, CollectiveWatchdog] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class ModelParallel:
    """One group of such ranks, and which parameters are whole on each of them, by their identity."""

    watchdog: CollectiveWatchdog
    whole: frozenset[int]

    @classmethod
    def of(cls, group: dist.ProcessGroup, replicated: Iterable[Tensor], parameters: Sequence[Tensor]) -> ModelParallel:
        """
        Raises:
            ValueError: this rank is not in the group, or one of `replicated` is none of the parameters.
        """
        if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
            raise ValueError("group= is no process group that this rank is in; give that of its tensor parallelism")
        whole = frozenset(map(id, replicated))
        if not whole <= set(map(id, parameters)):
            raise ValueError("replicated= has a tensor that is no parameter of this optimizer; give its own")
        if group not in _watches:
            _watches[group] = CollectiveWatchdog(group)
        return cls(_watches[group], whole)

    def is_replicated(self, parameter: Tensor) -> bool:
        """Whether each rank has all of it."""
        return id(parameter) in self.whole

    def each(self, norms: Sequence[Tensor]) -> Tensor:
        """What each rank has found, a row for each; a collective.

        Raises:
            AgreementError: ranks have different numbers of parameters with gradients.
        """
        name = "exchange of the norms of parts of parameters"
        counts = self._gathered(torch.tensor([len(norms)]), name)
        if len(set(counts.flatten().tolist())) > 1:
            raise AgreementError(
                f"ranks {self.watchdog.members} have gradients of {counts.flatten().tolist()} parameters: a norm over "
                "group= wants parts of the same ones on all of them; nothing was scaled"
            )
        return self._gathered(torch.stack(list(norms)).double() if norms else torch.zeros(0).double(), name)

    def _gathered(self, mine: Tensor, name: str) -> Tensor:
        sent = mine.to(self.watchdog.device)
        rows = [torch.empty_like(sent) for _ in self.watchdog.members]
        if len(rows) == 1:
            return mine[None]
        with self.watchdog.naming(name):
            self.watchdog.wait(dist.all_gather(rows, sent, group=self.watchdog.group, async_op=True))
        return torch.stack(rows).to(mine.device)


def tensors_of(replicated: object) -> list[Tensor]:
    """Return what is given as `replicated`, as a list.

    Raises:
        TypeError: it is no iterable of tensors.
    """
    is_list = isinstance(replicated, Iterable) and not isinstance(replicated, Tensor)
    found: list[Any] = [*replicated] if is_list else [replicated]  # type: ignore[misc]
    if not is_list or not all(isinstance(each, Tensor) for each in found):
        advice = "give a list of the parameters that are whole on each rank of group="
        raise TypeError(f"replicated is {replicated!r:.100}; {advice}")
    return found
