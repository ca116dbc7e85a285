"""State dicts of a sharded optimizer: checked on all ranks, and installed on all ranks or on none.

optimizer.consolidate_state_dict(to=0)       # on all ranks
if rank == 0:
    torch.save(optimizer.state_dict(), path)     # the plain optimizer's

optimizer.load_state_dict(torch.load(path))  # on all ranks, of any number: each keeps its own shards
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from copy import deepcopy
from typing import Any

from ...errors import StateError
from ...storage.mapped_storage import BufferLocation
from ..comm.agreement import check_agreement, report_errors
from ..comm.rank_group import all_failures, format_failures
from ..comm.watchdog import CollectiveWatchdog
from ..shards.layout import ShardLayout
from ..shards.shard_optimizer import ShardOptimizer
from . import validate_state
from .full_state import cut_state, gather_state
from .own_state import Entries, Key, OwnState
from .sharded_state import DiskBuffers, from_dtensors, to_dtensors

ADVICE = "Load the same state dict on all ranks; nothing was changed."
APART = ("params", "param_names")
Groups = list[dict[str, Any]]


class StateDicts:
    """State dicts of one sharded optimizer. `consolidated` is a copy of the whole state, until the state changes.

    A new optimizer has no state, on any rank.
    """

    def __init__(self, layout: ShardLayout, optimizer: ShardOptimizer, watchdog: CollectiveWatchdog) -> None:
        self.own, self.watchdog = OwnState(layout, optimizer, watchdog), watchdog
        self.consolidated: dict[int, Entries] | None = {}

    def consolidate(self, to: int | None, incomplete: bool) -> None:
        """Gather the whole state on the rank `to`, on all ranks for None or -1; a collective."""
        count = len(self.watchdog.members)
        check_agreement(self.watchdog, [f"where the state goes: to={to}"], "Give the same on all ranks")
        if to is not None and not -1 <= to < count:
            raise StateError(f"to={to}, and the group has {count} ranks; give one of them, or None for all")
        with self.watchdog.leaving_on_error():
            self.consolidated = gather_state(self.own, None if to == -1 else to, incomplete)

    def of_this_rank(self) -> dict[int, Entries]:
        if self.consolidated is None:
            rank = self.own.rank
            message = "of the group has its own part of the state, and no consolidated one since it changed"
            advice = f"call optimizer.consolidate_state_dict(to={rank}) on all ranks, or state_dict(all_ranks=True)"
            raise StateError(f"rank {rank} {message}; {advice}")
        return self.consolidated

    def sharded(self, on_disk: bool, where: BufferLocation, incomplete: bool) -> dict[int, dict[str, Any]]:
        return to_dtensors(self.own, DiskBuffers(where) if on_disk else None, incomplete)

    def reporting_errors(self) -> AbstractContextManager[None]:
        return report_errors(self.watchdog, validate_state.SUBJECT, ADVICE)

    def find_mismatch(self, groups: Groups, given: object, sharded: bool) -> str | None:
        return validate_state.find_mismatch(self.own, groups, given, sharded)

    def refuse_mismatch(self, given: object, mismatch: str | None) -> None:
        check_agreement(self.watchdog, list(validate_state.state_lines(given, mismatch)), ADVICE)
        if mismatch is not None:
            raise StateError(f"the state dict is not this optimizer's: {mismatch}; nothing was changed")

    def refuse_sharded_mismatch(self, given: Mapping[str, Any], mismatch: str | None) -> None:
        for rank, failure in all_failures(self.watchdog, mismatch, "comparison of the parts of a state").items():
            raise StateError(f"the state dict on rank {rank} is not this optimizer's: {failure}; nothing was changed")
        check_agreement(self.watchdog, list(validate_state.state_lines(given, None, sharded=True)), ADVICE)

    def install(self, given: Mapping[str, Any], current: Groups, sharded: bool) -> Groups:
        """Replace states and options, on all ranks or on none; return the new groups of the sharded optimizer."""
        state, groups = validate_state.by_index(given), given["param_groups"]
        inner, error, entries = self.own.optimizer.optimizer, None, None
        before = inner.state, inner.param_groups
        if sharded:
            with self.watchdog.leaving_on_error():
                entries = from_dtensors(self.own, state)
        try:
            if entries is None:
                entries = cut_state(self.own, state)
            inner.load_state_dict(_inner_state_dict(self.own, groups, entries))
        except Exception as caught:  # out of memory, or refused by the class itself
            error = caught
        if failures := all_failures(self.watchdog, error, "loading of a state"):
            inner.state, inner.param_groups = before
            text = format_failures(failures)
            raise StateError(f"the state could not be loaded: {text}; the optimizer is as it was") from error
        self.consolidated = None if state else {}
        return [
            {**_options(loading), **{name: now[name] for name in APART if name in now}, **_options(loaded)}
            for loading, loaded, now in zip(groups, inner.param_groups, current, strict=True)
        ]


def _inner_state_dict(own: OwnState, groups: Groups, entries: Mapping[Key, Entries]) -> dict[str, Any]:
    inner = own.optimizer.optimizer.param_groups
    number = {id(view): i for i, view in enumerate(view for group in inner for view in group["params"])}
    state = {
        number[id(view)]: dict(entries[shard.param, shard.begin])
        for shard, view in own.layout.own_shards()
        if (shard.param, shard.begin) in entries
    }
    inner_groups = [
        {**_options(group), "params": [number[id(view)] for view in own_group["params"]]}
        for group, own_group in zip(groups, inner, strict=True)
    ]
    return {"state": state, "param_groups": inner_groups}


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: deepcopy(value) for name, value in group.items() if name not in APART}
