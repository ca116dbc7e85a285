"""An optimizer of the same class, options and numbers, for other parameters.

    AdamW over 300 parameters                 ->   AdamW over a window of one of them, with its states
    one of the caller's, with self.beta = 0.9 ->   the same, with a beta of its own

`copy.copy` takes the way of a pickle: it leaves out what a class keeps beside its groups and states, and writes into
the defaults of the first. What may hold parameters or another optimizer is left out here, too, so that a trial never
reaches the caller's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.utils._pytree import tree_leaves

from ..profile.memory_meter import resident_bytes

SCALING = ("grad_scale", "found_inf")  # how a GradScaler tells a step what to do
PLAIN = int, float, complex, str, bytes, type(None), torch.dtype, torch.device
NOTES = ("_warned_capturable_if_run_uncaptured", "_need_device_dtype_check_for_fused")  # of torch's own steps


def clone_optimizer(optimizer: optim.Optimizer, groups: list[dict[str, Any]], state: Any = None) -> optim.Optimizer:
    """One that steps as the optimizer does, with these groups and states, the optimizer's own if None, and without
    hooks."""
    state = optimizer.state if state is None else state
    one = type(optimizer).__new__(type(optimizer))
    vars(one).update(attributes(optimizer))
    one.__setstate__({"defaults": dict(optimizer.defaults), "state": state, "param_groups": groups})
    return one


def attributes(optimizer: optim.Optimizer) -> dict[str, Any]:
    """Copies of the plain values that an optimizer keeps beside its groups and states."""
    apart = (*SCALING, "defaults", "state", "param_groups")
    own = {name: value for name, value in vars(optimizer).items() if name not in apart and not _is_of_torch(name)}
    return {name: _copied(value) for name, value in own.items() if _is_plain(value)}


def clone_nbytes(optimizer: optim.Optimizer) -> int:
    """Bytes that a twin takes for itself: its copies of numbers that are tensors."""
    return resident_bytes(leaf for leaf in tree_leaves(attributes(optimizer)) if isinstance(leaf, Tensor))


def changed_attributes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The names of the attributes that a step has changed or made."""
    kept = [name for name, value in after.items() if name in before and _is_same(before[name], value)]
    return sorted({*before, *after} - {*kept, *NOTES})


def _is_same(one: Any, other: Any) -> bool:
    if one is other or type(one) is not type(other):
        return one is other
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return bool(one == other)


def _is_of_torch(name: str) -> bool:
    """Whether it is one of the tables of hooks."""
    return name.startswith("_optimizer_") and name.endswith("_hooks")


def _is_plain(value: object) -> bool:
    if isinstance(value, Mapping):
        return type(value) is dict and all(map(_is_plain, (*value, *value.values())))
    if isinstance(value, list | tuple | set):
        return type(value) in (list, tuple, set) and all(map(_is_plain, value))
    if isinstance(value, Tensor):
        return value.dim() == 0 and not isinstance(value, nn.Parameter) and not value.requires_grad
    return isinstance(value, PLAIN)


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set):
        return type(value)(map(_copied, value))
    return value.clone() if isinstance(value, Tensor) else value
