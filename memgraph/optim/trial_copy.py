"""Copy an optimizer with all that it keeps, over other parameters, to try its step on those.

AdamW8bit over 300 parameters   ->   the same with its tables and settings, over one made-up parameter
a chain of Muon and AdamW       ->   a chain of copies of both

For trials alone: a copied object may count what the original's steps count.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Container, Mapping, Set
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import UpdateError
from ..system.own_attributes import attributes_of
from ..tensors.parameter_groups import held_optimizers, parameter_groups

LEFT_OUT = ("state", "param_groups", "step", "zero_grad", "grad_scale", "found_inf")  # replaced methods, and a scaler's
CONTAINERS = (list, tuple, set, frozenset)
DEPTH = 4  # of containers and objects in an attribute
SAMPLE_ELEMENTS = 512  # of a made-up parameter: few, since budgets count no trials
STEPS = 7  # RAdam's update takes more from the sixth on
ALIKE = (optim.Adam, optim.AdamW, optim.SGD)  # all steps but the first allocate alike


class UntriedUpdateError(UpdateError):
    """The step of an optimizer can't be tried on made-up parameters."""


def trial_error(optimizer: optim.Optimizer, error: Exception) -> UpdateError:
    return UntriedUpdateError(
        f"{type(optimizer).__name__} can't be planned, since its step can't be tried on a dense gradient: {error}; "
        "compile without optimizer=, and its states and its update are not counted"
    )


def distinct_steps(optimizer: optim.Optimizer) -> int:
    """Return the number of first steps among which is one that allocates as much as any."""
    return 2 if type(optimizer) in ALIKE else STEPS


def initial_state(optimizer: optim.Optimizer, options: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
    """Return the state of a parameter before its first step."""
    if not isinstance(optimizer, optim.Adagrad):
        return {}
    # Adagrad creates it in its constructor, and in torch 2.11 not in a step.
    return dict(optim.Adagrad([{**options, "params": [parameter]}]).state[parameter])


def trial_copy(optimizer: optim.Optimizer, others: Mapping[Tensor, Tensor] | None = None) -> optim.Optimizer:
    """Return a copy without states and hooks, whose groups have the `others` of their parameters, if any.

    Attributes that lead to parameters without others, to their modules or to their `id()` are left out, and so is what
    can't be copied: a step that reads them fails.
    """
    chain, others = [optimizer, *held_optimizers(optimizer)], others or {}
    known = {id(parameter): other for parameter, other in others.items()}
    memo: dict[int, Any] = dict(known)
    numbers = {id(parameter) for each in chain for parameter in parameter_groups(each)}
    copies: list[optim.Optimizer] = [type(each).__new__(type(each)) for each in chain]
    for each, new in zip(chain, copies, strict=True):
        memo[id(each)] = new
    with _disable_current_modes():  # a fake mode copies no real tensors
        for each, new in zip(chain, copies, strict=True):
            kept = {name: value for name, value in vars(each).items() if not is_left_out(name)}
            vars(new).update(_copies({n: v for n, v in kept.items() if not _is_tied(v, numbers, known)}, memo))
            groups = [{**_copies(group, memo), "params": []} for group in each.param_groups]
            for copied, group in zip(groups, each.param_groups, strict=True):
                copied["params"] += [others[p] for p in group["params"] if p in others]
            new.__setstate__({"defaults": new.defaults, "state": defaultdict(dict), "param_groups": groups})
    return copies[0]


def forked_draws(device: torch.device) -> AbstractContextManager[None]:
    """Give torch's generators their states back at the end of a trial: a step may draw."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


def copy_with(optimizer: optim.Optimizer, groups: list[dict[str, Any]]) -> optim.Optimizer:
    """Return a trial copy that has these groups."""
    copied = trial_copy(optimizer)
    copied.param_groups = groups
    return copied


def parts_of(optimizer: optim.Optimizer) -> list[optim.Optimizer]:
    """Return the optimizers that one holds and steps in turn, each over its own parameters; else itself.

    Raises:
        UntriedUpdateError: it holds another one over the same parameters, or over others than its own.
    """
    held = held_optimizers(optimizer)
    if not held:
        return [optimizer]
    theirs = sorted(id(parameter) for each in held for parameter in parameter_groups(each))
    if len(held) > 1 and theirs == sorted(map(id, parameter_groups(optimizer))):
        return held
    kinds = ", ".join(type(each).__name__ for each in held)
    raise UntriedUpdateError(
        f"{type(optimizer).__name__} can't be planned, since it holds {kinds}, and what it does beside is not known: a "
        "chain has several optimizers, each over its own parameters; compile without optimizer=, and its states and "
        "its update are not counted"
    )


def is_left_out(name: str) -> bool:
    return name in LEFT_OUT or (name.startswith("_optimizer_") and name.endswith("_hooks"))


def _copies(values: Mapping[str, Any], memo: dict[int, Any]) -> dict[str, Any]:
    """Return copies of those values that can be copied."""
    copies: dict[str, Any] = {}
    for name, value in values.items():
        if name == "params":  # of a group
            continue
        with suppress(Exception):  # whatever a class raises; a step that needs the value fails by name
            copies[name] = copy.deepcopy(value, memo)
    return copies


def _is_tied(value: Any, numbers: Set[int], known: Container[int], depth: int = 0) -> bool:
    """Return True for what leads to a parameter that nothing stands for, to its module, or to its number."""
    if isinstance(value, nn.Module):
        return any(id(parameter) in numbers for parameter in value.parameters())
    if type(value) is int:
        return value in numbers
    if isinstance(value, Tensor | optim.Optimizer) or depth > DEPTH:
        return id(value) in numbers and id(value) not in known
    inside = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, CONTAINERS) else ()
    return any(_is_tied(each, numbers, known, depth + 1) for each in (*inside, *(attributes_of(value) or {}).values()))
