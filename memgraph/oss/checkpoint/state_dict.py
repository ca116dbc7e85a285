"""The state of a sharded optimizer, saved and loaded: what `OSS` has of `torch.optim.Optimizer`'s own.

optimizer.consolidate_state_dict(to=0)       # on all ranks
if rank == 0:
    torch.save(optimizer.state_dict(), path)     # the plain optimizer's

optimizer.load_state_dict(torch.load(path))  # on all ranks, however many: each keeps its own ranges
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

from torch import optim

from ...errors import ShardError, StateError
from ..comm.agreement import check_agreement, report_errors
from ..comm.failures import failures, in_words
from ..comm.watchdog import CollectiveWatchdog
from ..offloaded_states import OffloadedShards
from ..shards.shard_views import ShardViews
from ..step import ShardedStep
from . import validate_state
from .full_state import Entries, cut_state, gather_state
from .reshard import Key
from .sharded_state import from_dtensors, to_dtensors

ADVICE = "Load the same state dict on all ranks; nothing was changed."
APART = ("params", "param_names")


class StateDictMixin(optim.Optimizer):
    """State dicts of an optimizer that holds pieces."""

    watchdog: CollectiveWatchdog
    layout: ShardViews
    inner: Any
    optimizer_class: type[optim.Optimizer]
    optimizer_kwargs: dict[str, Any]  # its options
    group_of: list[int]  # of each parameter
    splits_parameters: bool
    offloaded_shards: OffloadedShards
    sharded_step: ShardedStep
    gathered: dict[int, Entries] | None = None  # a copy of the state, since the last change

    def consolidate_state_dict(self, to: int | None = 0) -> None:
        """Bring a copy of the whole state to the rank `to` of the group, or to all if it is None or -1.

        Every rank has to call it. The copy lies in host memory until the next step.

        Raises:
            AgreementError: ranks were given others.
            StateError: something in the state can't be sent, or there is no such rank.
            CollectiveError: a rank did not come.
        """
        count = len(self.watchdog.members)
        check_agreement(self.watchdog, [f"where the state goes: to={to}"], "Give the same on all ranks")
        if to is not None and not -1 <= to < count:
            raise StateError(f"to={to}, and the group has {count} ranks; give one of them, or None for all")
        with self.watchdog.awaited():
            self.gathered = gather_state(self, None if to == -1 else to)

    def state_dict(self, all_ranks: bool = False) -> dict[str, Any]:
        """The plain optimizer's state dict: of a copy that is as old as the last step, with the options of now.

        Args:
            all_ranks: gather it on all ranks now; every rank has to call it.

        Raises:
            StateError: it was not consolidated on this rank since the last step.
        """
        if all_ranks or len(self.watchdog.members) == 1:
            self.consolidate_state_dict(None)
        if self.gathered is None:
            here = self.watchdog.group.rank()
            message = (
                f"rank {here} of the group has its own part of the state, and no consolidated one since it changed"
            )
            advice = f"call optimizer.consolidate_state_dict(to={here}) on all ranks, or state_dict(all_ranks=True)"
            raise StateError(f"{message}; {advice}")
        return self._packed(self.gathered)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take this rank's part of a plain optimizer's state dict; every rank has to call it, with the same.

        Raises:
            StateError: it is not one of this optimizer; says where it differs. Nothing was changed on any rank.
            AgreementError: the ranks were given different ones. Nothing was changed.
        """
        given: Any = dict(state_dict) if isinstance(state_dict, Mapping) else state_dict
        with report_errors(self.watchdog, validate_state.WHAT, ADVICE):
            for before in self._optimizer_load_state_dict_pre_hooks.values():
                changed = before(self, given)
                given = given if changed is None else changed
            found = self._trouble(given)
        self._admit(found, list(validate_state.lines(given, found)))
        self._install(given["param_groups"], lambda: cut_state(self, validate_state.by_place(given)))

    def sharded_state_dict(self) -> dict[str, Any]:
        """A state dict that torch.distributed.checkpoint saves: each rank has rows of each tensor, as a DTensor.

        Every rank has to call it. It is a copy.
        """
        with self.watchdog.awaited():
            return {**self._packed({}), "state": to_dtensors(self)}

    def load_sharded_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take what torch.distributed.checkpoint has loaded into a sharded state dict; every rank has to call it.

        Raises:
            StateError: it is not one of this optimizer; says where it differs. Nothing was changed on any rank.
        """
        self.refuse_sharded(state_dict)
        with self.watchdog.awaited():
            entries = from_dtensors(self, validate_state.by_place(state_dict))
        self._install(state_dict["param_groups"], lambda: entries)

    def refuse_sharded(self, state_dict: Mapping[str, Any]) -> None:
        """Look at a sharded state dict on all ranks, of which each has its own part.

        Raises:
            StateError: some rank can't take it; on all of them.
        """
        found = self._trouble(state_dict, sharded=True)
        for rank, told in failures(self.watchdog, found, "comparison of the parts of a state").items():
            raise StateError(f"the state dict on rank {rank} is not this optimizer's: {told}; nothing was changed")
        self._admit(None, list(validate_state.lines(state_dict, None, sharded=True)))

    def _trouble(self, given: object, sharded: bool = False) -> str | None:
        """What stands against loading it into the parameters as they are now."""
        try:
            self.refresh_views()
        except ShardError as error:
            return str(error)
        return validate_state.find_mismatch(self, given, sharded)

    def refresh_views(self) -> None:
        """Look for parameters that lie elsewhere now."""
        raise NotImplementedError

    def _admit(self, found: str | None, lines: list[str]) -> None:
        check_agreement(self.watchdog, lines, ADVICE)
        if found is not None:
            raise StateError(f"the state dict is not this optimizer's: {found}; nothing was changed")

    def _packed(self, state: Mapping[int, Entries]) -> dict[str, Any]:
        """What torch makes of such a state and the options of now, hooks and all."""
        kept, parameters = self.state, self.layout.parameters
        self.state = defaultdict(dict, {parameters[item]: dict(entries) for item, entries in state.items()})
        try:
            return super().state_dict()
        finally:
            self.state = kept

    def _install(self, groups: list[dict[str, Any]], entries: Callable[[], Mapping[Key, Entries]]) -> None:
        """Replace options and states, on all ranks or on none."""
        before, error = (self.inner.state, self.inner.param_groups), None
        try:
            self.inner.load_state_dict(self._inner_state(groups, entries()))
        except Exception as caught:  # there is no memory for it, or the class itself refuses it
            error = caught
        if told := failures(self.watchdog, error, "loading of a state"):
            self.inner.state, self.inner.param_groups = before
            raise StateError(f"the state could not be taken: {in_words(told)}; the optimizer is as it was") from error
        self.param_groups = [
            {**_options(own), **{name: now[name] for name in APART if name in now}, **_options(mine)}
            for own, mine, now in zip(groups, self.inner.param_groups, self.param_groups, strict=True)
        ]
        self.gathered = None
        self.sharded_step.loaded()
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _inner_state(self, groups: list[dict[str, Any]], entries: Mapping[Key, Entries]) -> dict[str, Any]:
        """The state dict of the optimizer that runs on pieces."""
        number = {
            id(view): i for i, view in enumerate(view for group in self.inner.param_groups for view in group["params"])
        }
        state = {
            number[id(view)]: dict(entries[piece.item, piece.begin])
            for laid in self.layout.buckets
            for piece, view in laid.own
            if (piece.item, piece.begin) in entries
        }
        inner = [
            {**_options(group), "params": [number[id(view)] for view in mine["params"]]}
            for group, mine in zip(groups, self.inner.param_groups, strict=True)
        ]
        return {"state": state, "param_groups": inner}


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: deepcopy(value) for name, value in group.items() if name not in APART}
