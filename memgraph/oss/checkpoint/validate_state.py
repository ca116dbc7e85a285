"""Whether a state dict is one of this optimizer's, looked at before anything is changed.

{"state": {0: {"exp_avg": f32[7]}}, "param_groups": [{"lr": 0.1, "params": [0]}]}   ->   None, or what is wrong with it
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from ...optim.first_state import FirstState
from ...optim.validate_state import Group, describe_value, fits_tensor, group_mismatches, with_defaults
from ...tensors.layout import flat, is_dense
from ..comm.agreement import checksum, written
from .sharded_state import place_of

if TYPE_CHECKING:
    from .state_dict import StateDictMixin

WHAT = "the state dict"
SAMPLED = 4096  # elements of a tensor that are compared between ranks


def find_mismatch(oss: StateDictMixin, given: object, sharded: bool = False) -> str | None:
    """What stands against loading it; None if nothing does.

    Args:
        sharded: it has this rank's rows of tensors, and of what is no row only what this rank owns.
    """
    try:
        return next(_troubles(oss, given, sharded), None)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        return f"it is not made as one ({error!r})"


def by_place(given: Mapping[str, Any]) -> dict[int, Any]:
    """The state by the places of the parameters, whatever numbers they had."""
    numbers = [number for group in given["param_groups"] for number in group["params"]]
    return {place: given["state"][number] for place, number in enumerate(numbers) if number in given["state"]}


def lines(given: object, found: str | None, sharded: bool = False) -> Iterator[str]:
    """What has to be the same on all ranks that load it."""
    yield f"{WHAT}: {found or 'fits'}"
    if found is None and isinstance(given, Mapping):
        for place, group in enumerate(given["param_groups"]):
            options = ", ".join(f"{name}={written(value)}" for name, value in sorted(group.items()))
            yield f"the options in group {place} of the state dict: {options}"
        for place, entries in by_place(given).items():
            told = [each for each in entries.items() if not sharded or isinstance(each[1], DTensor)]
            if told or not sharded:
                yield f"the state of parameter {place} in the state dict: {', '.join(map(_described, told))}"


def _troubles(oss: StateDictMixin, given: object, sharded: bool) -> Iterator[str]:
    if not isinstance(given, Mapping) or not {"state", "param_groups"} <= set(given):
        yield "it is no state dict of an optimizer, which has 'state' and 'param_groups'"
        return
    complete = partial(with_defaults, oss.optim, oss.inner.defaults)
    yield from group_mismatches(oss.param_groups, given["param_groups"], oss.optim, oss.defaults, complete)
    numbers = [number for group in given["param_groups"] for number in group["params"]]
    if strange := [number for number in given["state"] if number not in set(numbers)]:
        yield f"it has a state of parameter {strange[0]!r}, which is in none of its groups"
    entries = _Entries(oss, complete(given["param_groups"]), sharded)
    for place, each in by_place(given).items():
        yield from entries.troubles(place, each)


class _Entries:
    """What the states of parameters have to have in them."""

    def __init__(self, oss: StateDictMixin, groups: Sequence[Group], sharded: bool) -> None:
        self.oss, self.groups, self.sharded = oss, groups, sharded
        self.name, self.first = oss.optim.__name__, FirstState(oss.optim, oss.given)
        self.own = {piece.item for laid in oss.pieces.laid for piece, _ in laid.own}

    def troubles(self, place: int, entries: object) -> Iterator[str]:
        if not isinstance(entries, Mapping):
            yield f"the state of parameter {place} is a {type(entries).__name__}, and has to be a dict"
            return
        parameter = self.oss.pieces.parameters[place]
        group = self.groups[self.oss.group_of[place]]
        wanted = self.first.entries(group, parameter)
        there = {name: value for name, value in entries.items() if value is not None}
        missing = sorted(set(wanted) - set(there))
        is_whole = not self.sharded or place in self.own
        if there and missing and is_whole and self.first.needs(group, parameter, list(there)):
            yield f"parameter {place} has no {missing[0]!r}, and {self.name}'s has {describe_value(wanted[missing[0]])}"
        for name, value in there.items():
            if (wrong := self._wrong(parameter, value, wanted.get(name))) is not None:
                yield f"{name!r} of parameter {place} is {wrong}"

    def _wrong(self, parameter: Tensor, value: Any, wanted: Any) -> str | None:
        """What an entry is and should not be; `wanted` is None where nobody knows."""
        if isinstance(value, Tensor) and value.is_meta:
            return f"{describe_value(value)} on the meta device, where it has no values"
        if isinstance(value, DTensor) and not self.sharded:
            return f"{describe_value(value)} in rows, a DTensor; give it to load_sharded_state_dict()"
        if wanted is None and self.oss.is_cut and isinstance(value, Tensor) and value.dim():
            wanted = parameter  # an entry that an option has left, which is cut as the others
        if isinstance(wanted, Tensor) and not fits_tensor(value, wanted):
            return f"{describe_value(value)}, which does not fit into {self.name}'s {describe_value(wanted)}"
        if self.sharded and (place := place_of(self.oss, parameter, value)):
            return f"{describe_value(value)} {place}"
        return None


def _described(entry: tuple[str, Any]) -> str:
    """An entry with some of its values."""
    name, value = entry
    if not isinstance(value, Tensor):
        return f"{name} {written(value)}"
    if isinstance(value, DTensor) or not is_dense(value):
        return f"{name} {describe_value(value)}"
    if value.dim() == 0:
        return f"{name} {value.item()}"
    sample = flat(value)[:: max(1, value.numel() // SAMPLED)]
    return f"{name} {describe_value(value)} with values of checksum {checksum(sample):08x}"
