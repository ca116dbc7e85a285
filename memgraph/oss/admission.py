"""Whether a state dict is one of this optimizer's, looked at before anything is changed.

{"state": {0: {"exp_avg": f32[7]}}, "param_groups": [{"lr": 0.1, "params": [0]}]}   ->   None, or what is wrong with it
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .saving import Saving


def trouble(oss: Saving, given: object) -> str | None:
    """What stands against loading it; None if nothing does."""
    try:
        return next(_troubles(oss, given), None)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        return f"it is not made as one ({error!r})"


def by_place(given: Mapping[str, Any]) -> dict[int, Any]:
    """The state by the places of the parameters, whatever numbers they had."""
    numbers = [number for group in given["param_groups"] for number in group["params"]]
    return {place: given["state"][number] for place, number in enumerate(numbers) if number in given["state"]}


def lines(given: object, found: str | None) -> Iterator[str]:
    """What has to be the same on all ranks that load it."""
    yield f"the state dict: {found or 'fits'}"
    if found is None and isinstance(given, Mapping):
        for place, group in enumerate(given["param_groups"]):
            yield f"the options in group {place} of the state dict: {sorted(map(str, group.items()))}"
        for place, entries in by_place(given).items():
            yield f"the state of parameter {place} in the state dict: {sorted(map(_described, entries.items()))}"


def _troubles(oss: Saving, given: object) -> Iterator[str]:
    if not isinstance(given, Mapping) or not {"state", "param_groups"} <= set(given):
        yield "it is no state dict of an optimizer, which has 'state' and 'param_groups'"
        return
    yield from _of_groups(oss.param_groups, given["param_groups"], oss)
    numbers = [number for group in given["param_groups"] for number in group["params"]]
    if strange := [number for number in given["state"] if number not in set(numbers)]:
        yield f"it has a state of parameter {strange[0]!r}, which is in none of its groups"
    for place, entries in by_place(given).items():
        yield from _of_entries(oss, place, entries)


def _of_groups(own: Sequence[Mapping[str, Any]], given: Sequence[Mapping[str, Any]], oss: Saving) -> Iterator[str]:
    if len(own) != len(given):
        yield f"it has {_counted(len(given), 'group')}, and the optimizer has {len(own)}"
        return
    for place, (mine, theirs) in enumerate(zip(own, given, strict=True)):
        if len(theirs.get("params", ())) != len(mine["params"]):
            count = _counted(len(theirs.get("params", ())), "parameter")
            yield f"it has {count} in group {place}, and the optimizer has {len(mine['params'])}"
            return
    numbers = [number for group in given for number in group["params"]]
    if len(set(numbers)) != len(numbers):
        yield "it has a parameter twice"
    for place, complete in enumerate(_completed(oss, given)):
        if missing := sorted(set(oss.inner.defaults) - set(complete)):
            yield f"its group {place} has no {missing[0]!r}, so it is of another optimizer than {oss.optim.__name__}"


def _completed(oss: Saving, given: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The groups with what the optimizer adds to those that an older version has written."""
    groups = [{**group, "params": []} for group in given]
    stand_in = oss.optim.__new__(oss.optim)
    vars(stand_in).update(defaults=dict(oss.inner.defaults))
    stand_in.__setstate__({"state": {}, "param_groups": groups})
    return groups


def _of_entries(oss: Saving, place: int, entries: object) -> Iterator[str]:
    if not isinstance(entries, Mapping):
        yield f"the state of parameter {place} is a {type(entries).__name__}"
        return
    parameter = oss.pieces.parameters[place]
    if not oss.is_cut:
        return  # nobody but the optimizer knows what it has to be
    for name, value in entries.items():
        if not isinstance(value, Tensor) or value.dim() == 0:
            continue
        if value.shape != parameter.shape:
            shapes = f"{list(value.shape)}, and the parameter is {list(parameter.shape)}"
            yield f"{name!r} of parameter {place} is {shapes}"
        elif torch.promote_types(value.dtype, parameter.dtype) != parameter.dtype:
            yield f"{name!r} of parameter {place} is {value.dtype}, which does not fit into its {parameter.dtype}"


def _described(entry: tuple[str, Any]) -> str:
    name, value = entry
    return f"{name} {value.dtype}{list(value.shape)}" if isinstance(value, Tensor) else f"{name} {type(value).__name__}"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
