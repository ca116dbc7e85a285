"""Compare a state dict with the optimizer that is to load it, before anything is changed.

    {"state": {0: {"exp_avg": f32[7]}}, "param_groups": [{"lr": 0.1, "params": [0]}]}   ->   None, or what is wrong

Torch itself compares the number of parameters and takes the rest as it comes: options that are missing, and states of
another shape, are then errors in the middle of the next step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from numbers import Number
from typing import Any

import torch
from torch import Tensor, optim

from ..errors import StateError
from .first_state import FirstState, is_torch_optimizer

Group = Mapping[str, Any]
MALFORMED = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)


def check_state_dict(optimizer: optim.Optimizer, given: object) -> None:
    """Refuse a state dict that torch would load, and the next step fail with.

    Raises:
        StateError: says where it differs.
    """
    try:
        found = next(_troubles(optimizer, given), None)
    except MALFORMED as error:
        found = f"it is not made as one ({error!r})"
    if found is not None:
        raise StateError(found)


def class_name(kind: type[optim.Optimizer]) -> str:
    """Return the name under which the state of an optimizer of this class is saved: that of torch's own class which it
    extends, or its own."""
    own = [each for each in kind.__mro__ if is_torch_optimizer(each) and each is not optim.Optimizer]
    return (own or [kind])[0].__name__


def group_mismatches(
    own: Sequence[Group],
    given: Sequence[Group],
    kind: type[optim.Optimizer],
    defaults: Mapping[str, Any],
    complete: Callable[[Sequence[Group]], list[dict[str, Any]]],
) -> Iterator[str]:
    """What stands against these groups, of an optimizer of this class; `complete` adds what older versions lack."""
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
        if missing := sorted((set(defaults) & set(mine)) - set(theirs)):  # loading writes into those that are there
            yield f"its group {place} has no {missing[0]!r}, so it is of another optimizer than {kind.__name__}"
        if foreign := sorted(str(name) for name in (set(theirs) & _torchs_options()) - set(defaults) - set(mine)):
            yield f"its group {place} has {foreign[0]!r}, so it is of another optimizer than {kind.__name__}"
        for name in sorted(set(defaults) & set(theirs)):
            if not _is_option(mine.get(name, defaults[name]), theirs[name]):
                wanted = _kind_of_option(mine.get(name, defaults[name]))
                yield f"{name!r} of its group {place} is {_kind_of_option(theirs[name])}, and has to be {wanted}"


def with_defaults(
    kind: type[optim.Optimizer], defaults: Mapping[str, Any], given: Sequence[Group]
) -> list[dict[str, Any]]:
    """The groups with what the optimizer adds to those that an older version has written."""
    groups = [{**group, "params": []} for group in given]
    if kind.__setstate__ is not optim.Optimizer.__setstate__:  # torch's own adds nothing
        stand_in = kind.__new__(kind)
        vars(stand_in).update(defaults=dict(defaults))
        stand_in.__setstate__({"state": {}, "param_groups": groups})
    return groups


def fits_tensor(value: Any, wanted: Tensor) -> bool:
    """Whether it is what torch makes of it in its place, without a loss."""
    if wanted.dim() == 0 and isinstance(value, int | float):
        return True
    if not isinstance(value, Tensor) or value.shape != wanted.shape:
        return False
    if wanted.dim() == 0:  # counts and products, which may be of another type
        return not value.is_complex()
    alike = value.is_floating_point() == wanted.is_floating_point() and value.is_complex() == wanted.is_complex()
    return alike and torch.promote_types(value.dtype, wanted.dtype) == wanted.dtype


def describe_value(value: Any) -> str:
    """A type and a shape in words."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def _kind_of_option(value: Any) -> str:
    """A type in words, and those of the parts of a list or tuple."""
    parts = f" ({', '.join(map(describe_value, value))})" if isinstance(value, list | tuple) else ""
    return f"{describe_value(value)}{parts}"


@cache
def _torchs_options() -> frozenset[str]:
    """Names of the options of all optimizers of torch; others in a group are a scheduler's or the user's."""
    kinds = [kind for kind in vars(optim).values() if isinstance(kind, type) and issubclass(kind, optim.Optimizer)]
    return frozenset(name for kind in kinds for name in inspect.signature(kind).parameters) - {"params", "defaults"}


def pluralize(count: int, what: str) -> str:
    """A number of things in words."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def _troubles(optimizer: optim.Optimizer, given: Any) -> Iterator[str]:
    kind = type(optimizer)
    if not isinstance(given, Mapping) or not {"state", "param_groups"} <= set(given):
        yield "it is no state dict of an optimizer, which has 'state' and 'param_groups'"
        return

    def complete(groups: Sequence[Group]) -> list[dict[str, Any]]:
        return with_defaults(kind, optimizer.defaults, groups)

    yield from group_mismatches(optimizer.param_groups, given["param_groups"], kind, optimizer.defaults, complete)
    numbers = [number for group in given["param_groups"] for number in group["params"]]
    grouped = zip(complete(given["param_groups"]), optimizer.param_groups, strict=True)
    owners = [(options, parameter) for options, group in grouped for parameter in group["params"]]
    places, first = dict(zip(numbers, owners, strict=True)), FirstState(kind, {})
    for number, entries in given["state"].items():
        if number not in places:
            yield f"it has a state of parameter {number!r}, which is in none of its groups"
        elif not isinstance(entries, Mapping):
            yield f"the state of parameter {number} is a {type(entries).__name__}, and has to be a dict"
        else:
            yield from _entry_troubles(optimizer, first, number, places[number], entries)


def _entry_troubles(
    optimizer: optim.Optimizer, first: FirstState, number: object, owner: tuple[Group, Tensor], entries: Group
) -> Iterator[str]:
    name, (group, parameter) = type(optimizer).__name__, owner
    wanted = first.entries(group, parameter) or optimizer.state.get(parameter, {})
    there = {key: value for key, value in entries.items() if value is not None}
    missing = sorted(set(wanted) - set(there))
    if there and missing and first.needs(group, parameter, list(there)):
        yield f"parameter {number} has no {missing[0]!r}, and {name}'s has {describe_value(wanted[missing[0]])}"
    for key, value in there.items():
        if isinstance(wanted.get(key), Tensor) and not fits_tensor(value, wanted[key]):
            found = f"{key!r} of parameter {number} is {describe_value(value)}"
            yield f"{found}, which does not fit into {name}'s {describe_value(wanted[key])}"


def _is_option(mine: object, given: object) -> bool:
    """Whether an option may be in the place of another: numbers, and tensors of one, are alike."""
    if isinstance(mine, Number | Tensor):
        return isinstance(given, Number) or (isinstance(given, Tensor) and given.numel() == 1) or given is None
    if isinstance(mine, list | tuple):
        return isinstance(given, list | tuple) and len(given) == len(mine) and all(map(_is_option, mine, given))
    return mine is None or given is None or isinstance(given, type(mine))
