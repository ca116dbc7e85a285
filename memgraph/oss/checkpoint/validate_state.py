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
from ...optim.validate_state import Group, StateCheck, describe_value, with_defaults
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
