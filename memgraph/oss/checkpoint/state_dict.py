"""State dicts of a sharded optimizer: checked on all ranks, and installed on all ranks or on none.

optimizer.consolidate_state_dict(to=0)       # on all ranks
if rank == 0:
    torch.save(optimizer.state_dict(), path)     # the plain optimizer's

optimizer.load_state_dict(torch.load(path))  # on all ranks, of any number: each keeps its own shards

Compare a state dict with the optimizer that is to load it, before anything is changed.

{"state": {0: {"exp_avg": f32[7]}}, "param_groups": [{"lr": 0.1, "params": [0]}]}   ->   None, or what is wrong with it
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from ...errors import StateError
from ...optim.first_state import FirstState
from ...optim.placement import Location
from ...optim.validate_state import Group, StateCheck, describe_value, with_defaults
from ...storage.places import location_of
from ...tensors.layout import flat, is_dense
from ..comm.agreement import check_agreement, checksum, format_option, report_errors
from ..comm.rank_group import all_failures, format_failures
from ..comm.watchdog import CollectiveWatchdog
from ..shards.layout import ShardLayout
from ..shards.shard_optimizer import ShardOptimizer
from .full_state import cut_state, gather_state
from .own_state import Entries, Key, OwnState
from .sharded_state import DiskBuffers, from_dtensors, placement_mismatch, to_dtensors

ADVICE = "Load the same state dict on all ranks; nothing was changed."
APART = ("params", "param_names")
Groups = list[dict[str, Any]]
SUBJECT = "the state dict"
SAMPLED = 4096  # elements of a tensor that are compared between ranks


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

    def sharded(self, on_disk: bool, where: Location, incomplete: bool) -> dict[int, dict[str, Any]]:
        return to_dtensors(self.own, DiskBuffers(location_of(where)) if on_disk else None, incomplete)

    def reporting_errors(self) -> AbstractContextManager[None]:
        return report_errors(self.watchdog, SUBJECT, ADVICE)

    def find_mismatch(self, groups: Groups, given: object, sharded: bool) -> str | None:
        return find_mismatch(self.own, groups, given, sharded)

    def refuse_mismatch(self, given: object, mismatch: str | None) -> None:
        check_agreement(self.watchdog, list(state_lines(given, mismatch)), ADVICE)
        if mismatch is not None:
            raise StateError(f"the state dict is not this optimizer's: {mismatch}; nothing was changed")

    def refuse_sharded_mismatch(self, given: Mapping[str, Any], mismatch: str | None) -> None:
        for rank, failure in all_failures(self.watchdog, mismatch, "comparison of the parts of a state").items():
            raise StateError(f"the state dict on rank {rank} is not this optimizer's: {failure}; nothing was changed")
        check_agreement(self.watchdog, list(state_lines(given, None, sharded=True)), ADVICE)

    def install(self, given: Mapping[str, Any], current: Groups, sharded: bool) -> Groups:
        """Replace states and options, on all ranks or on none; return the new groups of the sharded optimizer."""
        state, groups = by_index(given), given["param_groups"]
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


def find_mismatch(own: OwnState, groups: Sequence[Group], given: object, sharded: bool = False) -> str | None:
    """Return what keeps this optimizer, with these groups, from loading a state dict; None if nothing does.

    Args:
        sharded: it has this rank's rows of tensors, and other entries on their owners only.
    """
    return _ShardedStateCheck(own, groups, sharded).find_mismatch(given)


def by_index(given: Mapping[str, Any]) -> dict[int, Any]:
    numbers = [number for group in given["param_groups"] for number in group["params"]]
    return {index: given["state"][number] for index, number in enumerate(numbers) if number in given["state"]}


def state_lines(given: object, mismatch: str | None, sharded: bool = False) -> Iterator[str]:
    """Describe what has to be equal on all ranks that load a state dict."""
    yield f"{SUBJECT}: {mismatch or 'fits'}"
    if mismatch is None and isinstance(given, Mapping):
        for place, group in enumerate(given["param_groups"]):
            options = ", ".join(f"{name}={format_option(value)}" for name, value in sorted(group.items()))
            yield f"the options in group {place} of the state dict: {options}"
        for index, entries in by_index(given).items():
            equal = [each for each in entries.items() if not sharded or isinstance(each[1], DTensor)]
            if equal or not sharded:
                yield f"the state of parameter {index} in the state dict: {', '.join(map(_describe, equal))}"


class _ShardedStateCheck(StateCheck):
    """Compares a state dict with an optimizer whose states are on several ranks."""

    def __init__(self, own: OwnState, groups: Sequence[Group], sharded: bool) -> None:
        optimizer = own.optimizer
        complete = partial(with_defaults, optimizer.kind, optimizer.optimizer.defaults)
        super().__init__(FirstState(optimizer.kind, optimizer.kwargs), groups, optimizer.defaults, complete)
        self.own, self.sharded = own, sharded
        self.owned = {id(own.layout.parameters[shard.param]) for shard, _ in own.layout.own_shards()}

    def is_whole(self, parameter: Tensor) -> bool:
        return not self.sharded or id(parameter) in self.owned

    def entry_mismatch(self, parameter: Tensor, value: Any, expected: Any) -> str | None:
        if isinstance(value, Tensor) and value.is_meta:
            return f"{describe_value(value)} on the meta device, where it has no values"
        if isinstance(value, DTensor) and not self.sharded:
            return f"{describe_value(value)} in rows, a DTensor; give it to load_sharded_state_dict()"
        if expected is None and self.own.optimizer.splits and isinstance(value, Tensor) and value.dim():
            expected = parameter  # an entry of an option that is now off, split like the others
        if wrong := super().entry_mismatch(parameter, value, expected):
            return wrong
        if self.sharded and (placement := placement_mismatch(self.own, parameter, value)):
            return f"{describe_value(value)} {placement}"
        return None


def _describe(entry: tuple[str, Any]) -> str:
    name, value = entry
    if not isinstance(value, Tensor):
        return f"{name} {format_option(value)}"
    if isinstance(value, DTensor) or not is_dense(value):
        return f"{name} {describe_value(value)}"
    if value.dim() == 0:
        return f"{name} {value.item()}"
    sample = flat(value)[:: max(1, value.numel() // SAMPLED)]
    return f"{name} {describe_value(value)} with values of checksum {checksum(sample):08x}"
