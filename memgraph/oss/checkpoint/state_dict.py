"""State dicts of a sharded optimizer: checked on all ranks, and installed on all ranks or on none.

optimizer.consolidate_state_dict(to=0)       # on all ranks
if rank == 0:
    torch.save(optimizer.state_dict(), path)     # the plain optimizer's

optimizer.load_state_dict(torch.load(path))  # on all ranks, of any number: each keeps its own shards
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

from ...errors import StateError
from ..comm.agreement import check_agreement
from ..comm.rank_group import all_failures, format_failures
from .full_state import gather_state
from .own_state import Entries, Key, OwnState
from .validate_state import state_lines

ADVICE = "Load the same state dict on all ranks; nothing was changed."
APART = ("params", "param_names")
Groups = list[dict[str, Any]]


def consolidate(own: OwnState, to: int | None, incomplete: bool) -> dict[int, Entries] | None:
    """Gather the whole state on the rank `to`, on all ranks for None or -1; a collective.

    Raises:
        AgreementError: `to` differs between ranks.
        StateError: there is no such rank, or the state can't be sent.
    """
    count = len(own.watchdog.members)
    check_agreement(own.watchdog, [f"where the state goes: to={to}"], "Give the same on all ranks")
    if to is not None and not -1 <= to < count:
        raise StateError(f"to={to}, and the group has {count} ranks; give one of them, or None for all")
    with own.watchdog.leaving_on_error():
        return gather_state(own, None if to == -1 else to, incomplete)


def refuse_mismatch(own: OwnState, given: object, mismatch: str | None) -> None:
    """
    Raises:
        StateError: the state dict, equal on all ranks, does not fit.
        AgreementError: ranks have different state dicts.
    """
    check_agreement(own.watchdog, list(state_lines(given, mismatch)), ADVICE)
    if mismatch is not None:
        raise StateError(f"the state dict is not this optimizer's: {mismatch}; nothing was changed")


def refuse_sharded_mismatch(own: OwnState, given: Mapping[str, Any], mismatch: str | None) -> None:
    """
    Raises:
        StateError: on all ranks, if the part of one does not fit.
        AgreementError: ranks have parts of different state dicts.
    """
    failures = all_failures(own.watchdog, mismatch, "comparison of the parts of a state")
    for rank, failure in failures.items():
        raise StateError(f"the state dict on rank {rank} is not this optimizer's: {failure}; nothing was changed")
    check_agreement(own.watchdog, list(state_lines(given, None, sharded=True)), ADVICE)


def install(own: OwnState, groups: Groups, current: Groups, entries: Callable[[], Mapping[Key, Entries]]) -> Groups:
    """Replace states and options, on all ranks or on none; return the new groups of the sharded optimizer.

    Args:
        groups: of the state dict.
        current: of the sharded optimizer.
        entries: returns the states of this rank's shards.
    """
    inner = own.optimizer.optimizer
    before, error = (inner.state, inner.param_groups), None
    try:
        inner.load_state_dict(_inner_state_dict(own, groups, entries()))
    except Exception as caught:  # out of memory, or refused by the class itself
        error = caught
    if failures := all_failures(own.watchdog, error, "loading of a state"):
        inner.state, inner.param_groups = before
        text = format_failures(failures)
        raise StateError(f"the state could not be loaded: {text}; the optimizer is as it was") from error
    return [
        {**_options(given), **{name: now[name] for name in APART if name in now}, **_options(loaded)}
        for given, loaded, now in zip(groups, inner.param_groups, current, strict=True)
    ]


def _inner_state_dict(own: OwnState, groups: Groups, entries: Mapping[Key, Entries]) -> dict[str, Any]:
    """Return the state dict of the optimizer that steps on this rank's shards."""
    inner = own.optimizer.optimizer.param_groups
    number = {id(view): i for i, view in enumerate(view for group in inner for view in group["params"])}
    state = {
        number[id(view)]: dict(entries[shard.param, shard.begin])
        for shard, view in own.layout.own_shards()
        if (shard.param, shard.begin) in entries
    }
    inner_groups = [
        {**_options(group), "params": [number[id(view)] for view in mine["params"]]}
        for group, mine in zip(groups, inner, strict=True)
    ]
    return {"state": state, "param_groups": inner_groups}


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: deepcopy(value) for name, value in group.items() if name not in APART}
