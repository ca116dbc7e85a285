"""Compare a state dict with the optimizer that is to load it, before anything is changed.

{"state": {0: {"exp_avg": f32[7]}}, "param_groups": [{"lr": 0.1, "params": [0]}]}   ->   None, or what is wrong with it
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from ...optim.first_state import FirstState
from ...optim.validate_state import Group, describe_value, fits_tensor, group_mismatches, with_defaults
from ...tensors.layout import flat, is_dense
from ..comm.agreement import checksum, format_option
from .own_state import OwnState
from .sharded_state import placement_mismatch

SUBJECT = "the state dict"
SAMPLED = 4096  # elements of a tensor that are compared between ranks


def find_mismatch(own: OwnState, groups: Sequence[Group], given: object, sharded: bool = False) -> str | None:
    """Return what keeps this optimizer, with these groups, from loading a state dict; None if nothing does.

    Args:
        sharded: it has this rank's rows of tensors, and other entries on their owners only.
    """
    try:
        return next(_mismatches(own, groups, given, sharded), None)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        return f"it is not made as one ({error!r})"


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


def _mismatches(own: OwnState, groups: Sequence[Group], given: object, sharded: bool) -> Iterator[str]:
    if not isinstance(given, Mapping) or not {"state", "param_groups"} <= set(given):
        yield "it is no state dict of an optimizer, which has 'state' and 'param_groups'"
        return
    kind, defaults = own.optimizer.kind, own.optimizer.defaults
    complete = partial(with_defaults, kind, own.optimizer.optimizer.defaults)
    yield from group_mismatches(groups, given["param_groups"], kind, defaults, complete)
    numbers = [number for group in given["param_groups"] for number in group["params"]]
    if strange := [number for number in given["state"] if number not in set(numbers)]:
        yield f"it has a state of parameter {strange[0]!r}, which is in no group"
    check = _EntryCheck(own, complete(given["param_groups"]), sharded)
    for index, entries in by_index(given).items():
        yield from check.mismatches(index, entries)


class _EntryCheck:
    """Compares the entries of states with those that a first step creates."""

    def __init__(self, own: OwnState, groups: Sequence[Group], sharded: bool) -> None:
        self.own, self.groups, self.sharded = own, groups, sharded
        self.name, self.first = own.optimizer.name, FirstState(own.optimizer.kind, own.optimizer.kwargs)
        self.owned = {shard.param for shard, _ in own.layout.own_shards()}

    def mismatches(self, index: int, entries: object) -> Iterator[str]:
        if not isinstance(entries, Mapping):
            yield f"the state of parameter {index} is a {type(entries).__name__}, and has to be a dict"
            return
        parameter = self.own.layout.parameters[index]
        group = self.groups[self.own.layout.group_of[index]]
        wanted = self.first.entries(group, parameter)
        present = {name: value for name, value in entries.items() if value is not None}
        missing = sorted(set(wanted) - set(present))
        is_whole = not self.sharded or index in self.owned
        if present and missing and is_whole and self.first.needs(group, parameter, list(present)):
            yield f"parameter {index} has no {missing[0]!r}, and {self.name}'s has {describe_value(wanted[missing[0]])}"
        for name, value in present.items():
            if (wrong := self._mismatch(parameter, value, wanted.get(name))) is not None:
                yield f"{name!r} of parameter {index} is {wrong}"

    def _mismatch(self, parameter: Tensor, value: Any, wanted: Any) -> str | None:
        """Describe an entry that is wrong; `wanted` is None where the class does not tell."""
        if isinstance(value, Tensor) and value.is_meta:
            return f"{describe_value(value)} on the meta device, where it has no values"
        if isinstance(value, DTensor) and not self.sharded:
            return f"{describe_value(value)} in rows, a DTensor; give it to load_sharded_state_dict()"
        if wanted is None and self.own.optimizer.splits and isinstance(value, Tensor) and value.dim():
            wanted = parameter  # an entry of an option that is now off, split like the others
        if isinstance(wanted, Tensor) and not fits_tensor(value, wanted):
            return f"{describe_value(value)}, which does not fit into {self.name}'s {describe_value(wanted)}"
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
