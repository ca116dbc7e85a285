"""Step a copy of an optimizer on whatever tensors it is given, by the optimizer's own step.

    AdamW, w of 1000000 elements   ->   AdamW.step on a parameter of 262144 elements, with its gradient and states

Nothing of any optimizer is written anew here.  What its states are, and what its update allocates, is found by stepping
on made-up parameters.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.utils._pytree import tree_leaves

from ..errors import UpdateError
from ..profile.memory_meter import measure_peak, resident_bytes
from ..system.profiler_thread import run_unprofiled
from .elementwise import ELEMENTWISE, unhooked_step

SCALING = ("grad_scale", "found_inf")  # how a GradScaler tells a step what to do
PLAIN_TYPES = int, float, complex, str, bytes, type(None), torch.dtype, torch.device
TORCH_FLAGS = ("_warned_capturable_if_run_uncaptured", "_need_device_dtype_check_for_fused")  # of torch's own steps


def clone_optimizer(optimizer: optim.Optimizer, groups: list[dict[str, Any]], state: Any = None) -> optim.Optimizer:
    """One that steps as the optimizer does, with these groups and states, the optimizer's own if None, and without
    hooks."""
    state = optimizer.state if state is None else state
    one = type(optimizer).__new__(type(optimizer))
    vars(one).update(plain_attributes(optimizer))
    one.__setstate__({"defaults": dict(optimizer.defaults), "state": state, "param_groups": groups})
    return one


def plain_attributes(optimizer: optim.Optimizer) -> dict[str, Any]:
    """Copies of the plain values that an optimizer keeps beside its groups and states."""
    apart = (*SCALING, "defaults", "state", "param_groups")
    own = {name: value for name, value in vars(optimizer).items() if name not in apart and not _is_of_torch(name)}
    return {name: _copied(value) for name, value in own.items() if _is_plain(value)}


def clone_nbytes(optimizer: optim.Optimizer) -> int:
    """Bytes that a twin takes for itself: its copies of numbers that are tensors."""
    return resident_bytes(leaf for leaf in tree_leaves(plain_attributes(optimizer)) if isinstance(leaf, Tensor))


def changed_attributes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The names of the attributes that a step has changed or made."""
    kept = [name for name, value in after.items() if name in before and _is_same(before[name], value)]
    return sorted({*before, *after} - {*kept, *TORCH_FLAGS})


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
    return isinstance(value, PLAIN_TYPES)


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set):
        return type(value)(map(_copied, value))
    return value.clone() if isinstance(value, Tensor) else value


StepInput = tuple[int, Tensor, Mapping[str, Any]]  # a group, a tensor with its gradient, and its state
SAMPLE_ELEMENTS = 4096  # elements of a made-up parameter
STEPS = 7  # RAdam's update takes more from the sixth on
STATE_ADVICE = "keep it in the state of each parameter"


class ClonedOptimizer:
    """A copy of an optimizer, with its options as they are now, that steps on what it is given."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self.options = [
            {key: _kept(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
        ]
        self.optimizer = clone_optimizer(optimizer, [], defaultdict(dict))
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        self.device = next((parameter.device for parameter in parameters), torch.device("cpu"))
        self.scaling: dict[str, Any] = {name: vars(optimizer)[name] for name in SCALING if name in vars(optimizer)}

    def step(self, pieces: Sequence[StepInput]) -> list[dict[str, Any] | None]:
        """Update tensors, each with its group and its state; returns the state of each, None if it has none."""
        vars(self.optimizer).update(self.scaling)
        return self._step(pieces)

    def state_dtypes(self, group: int, dtype: torch.dtype) -> dict[str, torch.dtype | None]:
        """What the state of a parameter has in it: the type of what has an element for each of its own, else None."""
        made = self._made(group, dtype)
        return {key: value.dtype if _alike(value, (2,)) else None for key, value in made.items()}

    def scalar_devices(self, group: int, dtype: torch.dtype) -> dict[str, torch.device]:
        """Where that lies of it which is a tensor, and one for all elements."""
        made = self._made(group, dtype)
        return {key: value.device for key, value in made.items() if isinstance(value, Tensor) and not value.dim()}

    def shared_changes(self, group: int, dtype: torch.dtype) -> str:
        """What a step changes that is not of the parameter alone; empty if nothing."""
        return self._tried(group, dtype)[1]

    def _made(self, group: int, dtype: torch.dtype) -> dict[str, Any]:
        """The state of a parameter of two elements.

        Raises:
            UpdateError: its step failed, or changes what is not of the parameter alone.
        """
        made, why = self._tried(group, dtype)
        if why:
            raise UpdateError(f"{why}, and an update in windows is made of many; {STATE_ADVICE}")
        return made

    def _tried(self, group: int, dtype: torch.dtype) -> tuple[dict[str, Any], str]:
        before = plain_attributes(self.optimizer)
        try:
            piece = _made_up(2, dtype, self.device)
            (state,) = self._step([(group, piece, initial_state(self.optimizer, self.options[group], piece))])
        except Exception as error:
            raise profiling_error(self.optimizer, error) from error
        others = changed_attributes(before, plain_attributes(self.optimizer))
        why = f"{type(self.optimizer).__name__}.{others[0]} is another after a step" if others else ""
        return state or {}, why

    def temporaries(self, group: int, dtype: torch.dtype) -> Temporaries:
        """What its updates allocate and free, states that stay left out."""
        one, large, two = (
            self._allocates(group, counts, dtype)
            for counts in ([SAMPLE_ELEMENTS], [2 * SAMPLE_ELEMENTS], [SAMPLE_ELEMENTS] * 2)
        )
        fixed, together = max(0, 2 * one - large), bool(self.options[group].get("foreach"))
        return Temporaries(fixed, (large - one) / SAMPLE_ELEMENTS, max(0, two - one) / SAMPLE_ELEMENTS, together)

    def _allocates(self, group: int, counts: Sequence[int], dtype: torch.dtype) -> int:
        """The most that updates of made-up parameters take, one after the other."""
        pieces, most = [_made_up(count, dtype, self.device) for count in counts], 0
        states = [initial_state(self.optimizer, self.options[group], piece) for piece in pieces]
        for _ in range(STEPS):
            given = [(group, piece, state) for piece, state in zip(pieces, states, strict=True)]
            before = _held(states)
            found, seen = run_unprofiled(
                functools.partial(measure_peak, functools.partial(self._step, given), self.device)
            )
            states = [state or {} for state in found]
            most = max(most, seen.peak - (_held(states) - before) if seen else 0)
        return most + clone_nbytes(self.optimizer)

    def _step(self, pieces: Sequence[StepInput]) -> list[dict[str, Any] | None]:
        one = self.optimizer
        one.state = defaultdict(dict, {piece: dict(state) for _, piece, state in pieces if state})
        one.param_groups = [
            {**options, "params": [piece for group, piece, _ in pieces if group == i]}
            for i, options in enumerate(self.options)
            if any(group == i for group, _, _ in pieces)
        ]
        try:
            with _numbers_on_host(one):
                unhooked_step(type(one))(one)
            return [one.state.get(piece) for _, piece, _ in pieces]
        finally:
            one.state, one.param_groups = defaultdict(dict), []
            for name in self.scaling:
                vars(one).pop(name, None)


@dataclass(frozen=True)
class Temporaries:
    """Bytes that an update allocates and frees: some for each parameter, some for each element of it, and some for each
    element of the one before it, which stay until they are replaced."""

    fixed: int
    each: float
    before: float
    together: bool  # all parameters of the group at once

    def most(self, counts: Sequence[int]) -> int:
        """The most that an update of parameters of so many elements takes, in this order."""
        if self.together:
            return sum(self.fixed + math.ceil(self.each * count) for count in counts)
        pairs = [sorted(pair) for pair in itertools.pairwise([0, *counts])]
        return max(
            (2 * self.fixed + math.ceil(self.each * large + self.before * small) for small, large in pairs), default=0
        )


def _numbers_on_host(optimizer: optim.Optimizer) -> AbstractContextManager[Any]:
    """Have torch's own optimizers make their numbers on the host whatever the caller's default device is, as they do by
    themselves from torch 2.13 on."""
    own = type(optimizer).__module__.startswith("torch.optim.")
    return torch.device("cpu") if own and torch.get_default_device().type != "cpu" else nullcontext()


def unclonable_reason(optimizer: optim.Optimizer) -> str:
    """What a step changes that is not of each parameter alone, so that many can't take its place; empty if nothing.

    Raises:
        UpdateError: it is the caller's own, and its step failed.
    """
    if type(optimizer) in ELEMENTWISE:
        return ""
    clone = ClonedOptimizer(optimizer)
    kinds = dict.fromkeys((i, p.dtype) for i, group in enumerate(optimizer.param_groups) for p in group["params"])
    return next(filter(None, (clone.shared_changes(*kind) for kind in kinds)), "")


def initial_state(optimizer: optim.Optimizer, options: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
    """The state of a parameter before its first step."""
    if not isinstance(optimizer, optim.Adagrad):
        return {}
    # It has one from where the optimizer was made; torch 2.11 makes none in a step.
    return dict(optim.Adagrad([{**options, "params": [parameter]}]).state[parameter])


def profiling_error(optimizer: optim.Optimizer, error: Exception) -> UpdateError:
    """A trial of its step has failed."""
    return UpdateError(
        f"{type(optimizer).__name__} can't be planned, since its step can't be tried on a dense gradient: {error}; "
        "compile without optimizer=, and its states and its update are not counted"
    )


def _made_up(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    piece = torch.zeros(count, dtype=dtype, device=device)
    piece.grad = torch.zeros_like(piece)
    return piece


def _held(states: Sequence[Mapping[str, Any]]) -> int:
    return resident_bytes(value for state in states for value in state.values() if isinstance(value, Tensor))


def _alike(value: Any, shape: Sequence[int]) -> bool:
    return isinstance(value, Tensor) and tuple(value.shape) == tuple(shape)


def _kept(value: Any) -> Any:
    """An option as it is now; a scheduler writes into a learning rate that is a tensor."""
    return value.clone() if isinstance(value, Tensor) else value
