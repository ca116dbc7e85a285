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
from torch import Tensor, optim

from ..errors import UpdateError
from ..profile.memory_meter import measure_peak, resident_bytes
from ..system.profiler_thread import run_unprofiled
from .elementwise import ELEMENTWISE, without_hooks
from .twin import SCALING, attributes, changed_attributes, clone_nbytes, clone_optimizer

Given = tuple[int, Tensor, Mapping[str, Any]]  # a group, a tensor with its gradient, and its state
TRIED = 4096  # elements of a made-up parameter
STEPS = 7  # RAdam's update takes more from the sixth on
APART = "keep it in the state of each parameter"


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

    def step(self, pieces: Sequence[Given]) -> list[dict[str, Any] | None]:
        """Update tensors, each with its group and its state; returns the state of each, None if it has none."""
        vars(self.optimizer).update(self.scaling)
        return self._step(pieces)

    def entries(self, group: int, dtype: torch.dtype) -> dict[str, torch.dtype | None]:
        """What the state of a parameter has in it: the type of what has an element for each of its own, else None."""
        made = self._made(group, dtype)
        return {key: value.dtype if _alike(value, (2,)) else None for key, value in made.items()}

    def numbers(self, group: int, dtype: torch.dtype) -> dict[str, torch.device]:
        """Where that lies of it which is a tensor, and one for all elements."""
        made = self._made(group, dtype)
        return {key: value.device for key, value in made.items() if isinstance(value, Tensor) and not value.dim()}

    def apart(self, group: int, dtype: torch.dtype) -> str:
        """What a step changes that is not of the parameter alone; empty if nothing."""
        return self._tried(group, dtype)[1]

    def _made(self, group: int, dtype: torch.dtype) -> dict[str, Any]:
        """The state of a parameter of two elements.

        Raises:
            UpdateError: its step failed, or changes what is not of the parameter alone.
        """
        made, why = self._tried(group, dtype)
        if why:
            raise UpdateError(f"{why}, and an update in windows is made of many; {APART}")
        return made

    def _tried(self, group: int, dtype: torch.dtype) -> tuple[dict[str, Any], str]:
        before = attributes(self.optimizer)
        try:
            piece = _made_up(2, dtype, self.device)
            (state,) = self._step([(group, piece, has_begun(self.optimizer, self.options[group], piece))])
        except Exception as error:
            raise untried_reason(self.optimizer, error) from error
        others = changed_attributes(before, attributes(self.optimizer))
        why = f"{type(self.optimizer).__name__}.{others[0]} is another after a step" if others else ""
        return state or {}, why

    def temporaries(self, group: int, dtype: torch.dtype) -> Temporaries:
        """What its updates allocate and free, states that stay left out."""
        one, large, two = (self._allocates(group, counts, dtype) for counts in ([TRIED], [2 * TRIED], [TRIED] * 2))
        fixed, together = max(0, 2 * one - large), bool(self.options[group].get("foreach"))
        return Temporaries(fixed, (large - one) / TRIED, max(0, two - one) / TRIED, together)

    def _allocates(self, group: int, counts: Sequence[int], dtype: torch.dtype) -> int:
        """The most that updates of made-up parameters take, one after the other."""
        pieces, most = [_made_up(count, dtype, self.device) for count in counts], 0
        states = [has_begun(self.optimizer, self.options[group], piece) for piece in pieces]
        for _ in range(STEPS):
            given = [(group, piece, state) for piece, state in zip(pieces, states, strict=True)]
            before = _held(states)
            found, seen = run_unprofiled(
                functools.partial(measure_peak, functools.partial(self._step, given), self.device)
            )
            states = [state or {} for state in found]
            most = max(most, seen.peak - (_held(states) - before) if seen else 0)
        return most + clone_nbytes(self.optimizer)

    def _step(self, pieces: Sequence[Given]) -> list[dict[str, Any] | None]:
        one = self.optimizer
        one.state = defaultdict(dict, {piece: dict(state) for _, piece, state in pieces if state})
        one.param_groups = [
            {**options, "params": [piece for group, piece, _ in pieces if group == i]}
            for i, options in enumerate(self.options)
            if any(group == i for group, _, _ in pieces)
        ]
        try:
            with _numbers_on_host(one):
                without_hooks(type(one))(one)
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


def clone_obstacle(optimizer: optim.Optimizer) -> str:
    """What a step changes that is not of each parameter alone, so that many can't take its place; empty if nothing.

    Raises:
        UpdateError: it is the caller's own, and its step failed.
    """
    if type(optimizer) in ELEMENTWISE:
        return ""
    stepper = ClonedOptimizer(optimizer)
    kinds = dict.fromkeys((i, p.dtype) for i, group in enumerate(optimizer.param_groups) for p in group["params"])
    return next(filter(None, (stepper.apart(*kind) for kind in kinds)), "")


def has_begun(optimizer: optim.Optimizer, options: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
    """The state of a parameter before its first step."""
    if not isinstance(optimizer, optim.Adagrad):
        return {}
    # It has one from where the optimizer was made; torch 2.11 makes none in a step.
    return dict(optim.Adagrad([{**options, "params": [parameter]}]).state[parameter])


def untried_reason(optimizer: optim.Optimizer, error: Exception) -> UpdateError:
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
