"""Compare a state dict with the optimizer that will load it, before anything is changed.

    {"state": {0: {"exp_avg": f32[7]}}, "param_groups": [{"lr": 0.1, "params": [0]}]}   ->   None, or a StateError

torch compares the number of parameters only: missing options and states of another shape become errors in the middle of
the next step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from numbers import Number
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, optim

from ..errors import StateError
from .first_state import FirstState, is_torch_optimizer

Group = Mapping[str, Any]
Complete = Callable[[Sequence[Group]], list[dict[str, Any]]]
MALFORMED = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)


def check_state_dict(optimizer: optim.Optimizer, given: object) -> None:
    """Refuse a state dict that torch would load, but with which the next step would fail.

    Raises:
        StateError: says where it differs.
    """
    complete = partial(with_defaults, type(optimizer), optimizer.defaults)
    first = FirstState(type(optimizer), {})
    check = StateCheck(first, optimizer.param_groups, optimizer.defaults, complete, optimizer.state)
    if (mismatch := check.find_mismatch(given)) is not None:
        raise StateError(mismatch)


def class_name(kind: type[optim.Optimizer]) -> str:
    """Return the class name that is saved with a state: that of the torch class which it extends, or its own."""
    torch_classes = [base for base in kind.__mro__ if is_torch_optimizer(base) and base is not optim.Optimizer]
    return (torch_classes or [kind])[0].__name__


def group_mismatches(
    own: Sequence[Group], given: Sequence[Group], kind: type[optim.Optimizer], defaults: Group, complete: Complete
) -> Iterator[str]:  # fmt: skip
    """Yield how `given` groups differ from the `own` ones; `complete` adds options that older versions lack."""
    if len(own) != len(given):
        yield f"it has {pluralize(len(given), 'group')}, and the optimizer has {len(own)}"
        return
    for place, (mine, theirs) in enumerate(zip(own, given, strict=True)):
        if len(theirs.get("params", ())) != len(mine["params"]):
            count = pluralize(len(theirs.get("params", ())), "parameter")
            yield f"it has {count} in group {place}, and the optimizer has {len(mine['params'])}"
            return
    numbers = [number for group in given for number in group["params"]]
    if len(set(numbers)) != len(numbers):
        yield "it has a parameter twice"
    for place, (mine, theirs) in enumerate(zip(own, complete(given), strict=True)):
        if missing := sorted((set(defaults) & set(mine)) - set(theirs)):  # loading overwrites those that exist
            yield f"its group {place} has no {missing[0]!r}, so it is of another optimizer than {kind.__name__}"
        if foreign := sorted(str(name) for name in (set(theirs) & _torch_options()) - set(defaults) - set(mine)):
            yield f"its group {place} has {foreign[0]!r}, so it is of another optimizer than {kind.__name__}"
        for name in sorted(set(defaults) & set(theirs)):
            expected = mine.get(name, defaults[name])
            if not _may_replace(expected, theirs[name]):
                actual = _describe_option(theirs[name])
                yield f"{name!r} of its group {place} is {actual}, and has to be {_describe_option(expected)}"


def with_defaults(
    kind: type[optim.Optimizer], defaults: Mapping[str, Any], given: Sequence[Group]
) -> list[dict[str, Any]]:
    """Return the groups with the options that the class adds to those of an older version."""
    groups = [{**group, "params": []} for group in given]
    if kind.__setstate__ is not optim.Optimizer.__setstate__:  # torch's own adds nothing
        stand_in = kind.__new__(kind)
        vars(stand_in).update(defaults=dict(defaults))
        stand_in.__setstate__({"state": {}, "param_groups": groups})
    return groups


class StateCheck:
    """Compares a state dict with the groups of an optimizer, and with the states that its first step creates."""

    def __init__(
        self, first: FirstState, groups: Sequence[Group], defaults: Group, complete: Complete,
        states: Mapping[Tensor, Any] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        """Compare with these groups and defaults.

        Args:
            complete: adds options that older versions of the class lack.
            states: of parameters now, for a class of the user, whose first step is not run.
        """
        self.first, self.groups, self.defaults, self.complete, self.states = first, groups, defaults, complete, states
        self.name = first.kind.__name__

    def find_mismatch(self, given: object) -> str | None:
        """Return where a state dict differs; None if it fits."""
        try:
            return next(self._mismatches(given), None)
        except MALFORMED as error:
            return f"it is not made as one ({error!r})"

    def is_whole(self, parameter: Tensor) -> bool:
        """Return True if a state dict has all entries of this parameter's state."""
        return True

    def entry_mismatch(self, parameter: Tensor, value: Any, expected: Any) -> str | None:
        """Describe an entry that is wrong; `expected` is None where the class does not tell."""
        if isinstance(expected, Tensor) and not fits_tensor(value, expected):
            return f"{describe_value(value)}, which does not fit into {self.name}'s {describe_value(expected)}"
        return None

    def _mismatches(self, given: Any) -> Iterator[str]:
        if not isinstance(given, Mapping) or not {"state", "param_groups"} <= set(given):
            yield "it is no state dict of an optimizer, which has 'state' and 'param_groups'"
            return
        groups = given["param_groups"]
        yield from group_mismatches(self.groups, groups, self.first.kind, self.defaults, self.complete)
        numbers = [number for group in groups for number in group["params"]]
        if strange := [number for number in given["state"] if number not in set(numbers)]:
            yield f"it has a state of parameter {strange[0]!r}, which is in no group"
        grouped = zip(self.complete(groups), self.groups, strict=True)
        owners = [(options, parameter) for options, own in grouped for parameter in own["params"]]
        for place, (number, owner) in enumerate(zip(numbers, owners, strict=True)):
            entries = given["state"].get(number, {})
            if not isinstance(entries, Mapping):
                yield f"the state of parameter {place} is a {type(entries).__name__}, and has to be a dict"
            else:
                yield from self._entry_mismatches(place, owner, entries)

    def _entry_mismatches(self, place: int, owner: tuple[Group, Tensor], entries: Group) -> Iterator[str]:
        group, parameter = owner
        expected = self.first.entries(group, parameter) or self.states.get(parameter, {})
        present = {name: value for name, value in entries.items() if value is not None}
        missing = sorted(set(expected) - set(present))
        is_short = present and missing and self.is_whole(parameter)
        if is_short and self.first.needs(group, parameter, list(present)):
            wanted = describe_value(expected[missing[0]])
            yield f"parameter {place} has no {missing[0]!r}, and {self.name}'s has {wanted}"
        for name, value in present.items():
            if (wrong := self.entry_mismatch(parameter, value, expected.get(name))) is not None:
                yield f"{name!r} of parameter {place} is {wrong}"


def fits_tensor(value: Any, expected: Tensor) -> bool:
    """Return True if torch converts the value to the type of `expected` without loss."""
    if expected.dim() == 0 and isinstance(value, int | float):
        return True
    if not isinstance(value, Tensor) or value.shape != expected.shape:
        return False
    if expected.dim() == 0:  # counts and products, which may have another type
        return not value.is_complex()
    alike = value.is_floating_point() == expected.is_floating_point() and value.is_complex() == expected.is_complex()
    return alike and torch.promote_types(value.dtype, expected.dtype) == expected.dtype


def describe_value(value: Any) -> str:
    """Return type and shape as text."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def _describe_option(value: Any) -> str:
    items = f" ({', '.join(map(describe_value, value))})" if isinstance(value, list | tuple) else ""
    return f"{describe_value(value)}{items}"


@cache
def _torch_options() -> frozenset[str]:
    """Names of the options of all optimizers of torch; others in a group belong to a scheduler or the user."""
    kinds = [kind for kind in vars(optim).values() if isinstance(kind, type) and issubclass(kind, optim.Optimizer)]
    return frozenset(name for kind in kinds for name in inspect.signature(kind).parameters) - {"params", "defaults"}


def pluralize(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _may_replace(mine: object, given: object) -> bool:
    """Return True if an option may replace another: numbers, and tensors of one element, are alike."""
    if isinstance(mine, Number | Tensor):
        return isinstance(given, Number) or (isinstance(given, Tensor) and given.numel() == 1) or given is None
    if isinstance(mine, list | tuple):
        return isinstance(given, list | tuple) and len(given) == len(mine) and all(map(_may_replace, mine, given))
    return mine is None or given is None or isinstance(given, type(mine))
