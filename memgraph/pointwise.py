"""Step a copy of an optimizer on pieces of its parameters.

    AdamW, w of 1000000 elements   ->   AdamW.step on a parameter of 262144 elements, with its gradient and states

A pointwise optimizer changes each element by that element's parameter, gradient and states alone, so its own step may
be run on any range of elements. Nothing of any optimizer is written anew here. Which ones are pointwise is a list, and
the tests show each of them bit-equal in windows; of another one its own class may say it.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, optim

from .errors import UpdateError
from .peak import measured, resident_bytes

POINTWISE = (
    *(optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad, optim.RMSprop, optim.Adamax),
    *(optim.NAdam, optim.RAdam, optim.Adadelta, optim.Rprop, optim.ASGD),
)
OPTIONS = ("differentiable", "capturable")  # with which no update is run in windows
EXACT = (torch.float32, torch.float64)  # results in these do not depend on which elements a kernel takes at once
Given = tuple[int, Tensor, Mapping[str, Any]]  # a group, a tensor with its gradient, and its state
TRIED = 4096  # elements of a made-up parameter
STEPS = 7  # RAdam's update takes more from the sixth on


def by_elements(kind: type[optim.Optimizer]) -> bool:
    """Whether an optimizer of this class changes each element by itself: it is one of the list, or its class says so,
    with `pointwise = True`.  A class that is derived from such a one may do otherwise, and says so again."""
    return kind in POINTWISE or vars(kind).get("pointwise") is True


def is_pointwise(optimizer: optim.Optimizer) -> bool:
    """Whether its update can be run in windows, whatever gradients there will be."""
    return by_elements(type(optimizer)) and not any(group.get(o) for group in optimizer.param_groups for o in OPTIONS)


def obstacle_to_windows(optimizer: optim.Optimizer, trained: Callable[[Tensor], bool]) -> str | None:
    """What is in the way of running its update in windows, whatever gradients those that are `trained` will have, in
    words, with what to do."""
    name = type(optimizer).__name__
    if not by_elements(type(optimizer)):
        known = ", ".join(one.__name__ for one in POINTWISE)
        message = f"{name} is not known to change each element by itself, so its state can't be streamed"
        advice = f"use one of {known} itself, say pointwise = True in its class if that is so"
        return f"{message}; {advice}, or leave state and parameters on the device"
    for i, group in enumerate(optimizer.param_groups):
        for option in OPTIONS:
            if group.get(option):
                return f"{name} with {option}=True can't be run in windows; set {option}=False"
        for parameter in filter(trained, group["params"]):
            if is_unsteady(optimizer, i, parameter.dtype):
                message = f"SGD with fused=True does not give the same twice in {parameter.dtype}"
                return f"{message}, so it can't be run in windows; set fused=False"
    return None


def refuse(optimizer: optim.Optimizer) -> None:
    """Raise what is in the way of running this optimizer's update in windows.

    Raises:
        UpdateError: it is none of those that are known to be pointwise, or an option or a gradient stands against it.
    """
    if found := obstacle_to_windows(optimizer, lambda parameter: parameter.grad is not None):
        raise UpdateError(found)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                _refuse_gradient(type(optimizer).__name__, parameter, parameter.grad)


def is_unsteady(optimizer: optim.Optimizer, group: int, dtype: torch.dtype) -> bool:
    """Whether an update does not give the same twice."""
    # Seen in torch 2.13 with momentum: the last elements differ from run to run.
    return type(optimizer) is optim.SGD and bool(optimizer.param_groups[group]["fused"]) and dtype not in EXACT


def _refuse_gradient(name: str, parameter: Tensor, gradient: Tensor) -> None:
    where = f"of a parameter of shape {tuple(parameter.shape)}"
    if gradient.layout != torch.strided:
        advice = "make it dense, e.g. with Embedding(sparse=False)"
        raise UpdateError(f"{name} in windows takes dense gradients, and that {where} is {gradient.layout}; {advice}")
    kind = type(parameter)
    if kind not in (Tensor, torch.nn.Parameter) or parameter.device != gradient.device or parameter.is_meta:
        found = f"{kind.__name__} on {parameter.device}, its gradient on {gradient.device}"
        raise UpdateError(f"{name} in windows takes plain tensors of one device, not a {found}; leave it on the device")


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


class Alone:
    """A copy of an optimizer, with its options as they are now, that steps on what it is given."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self.options = [
            {key: _kept(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
        ]
        self.optimizer = copy.copy(optimizer)
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        self.device = next((parameter.device for parameter in parameters), torch.device("cpu"))
        # A copy takes no attributes along, and these are how a GradScaler tells a fused update what to do.
        scaling = ("grad_scale", "found_inf")
        self.scaling: dict[str, Any] = {name: vars(optimizer)[name] for name in scaling if name in vars(optimizer)}

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

    def _made(self, group: int, dtype: torch.dtype) -> dict[str, Any]:
        """The state of a parameter of two elements."""
        try:
            (state,) = self._step([(group, _made_up(2, dtype, self.device), {})])
        except Exception as error:
            raise untried(self.optimizer, error) from error
        return state or {}

    def temporaries(self, group: int, dtype: torch.dtype) -> Temporaries:
        """What its updates allocate and free, states that stay left out."""
        one, large, two = (self._allocates(group, counts, dtype) for counts in ([TRIED], [2 * TRIED], [TRIED] * 2))
        fixed, together = max(0, 2 * one - large), bool(self.options[group].get("foreach"))
        return Temporaries(fixed, (large - one) / TRIED, max(0, two - one) / TRIED, together)

    def _allocates(self, group: int, counts: Sequence[int], dtype: torch.dtype) -> int:
        """The most that updates of made-up parameters take, one after the other."""
        pieces, most = [_made_up(count, dtype, self.device) for count in counts], 0
        states: list[dict[str, Any]] = [{} for _ in pieces]
        for _ in range(STEPS):
            given = [(group, piece, state) for piece, state in zip(pieces, states, strict=True)]
            before = _held(states)
            found, seen = measured(functools.partial(self._step, given), self.device)
            states = [state or {} for state in found]
            most = max(most, seen.peak - (_held(states) - before) if seen else 0)
        return most

    def _step(self, pieces: Sequence[Given]) -> list[dict[str, Any] | None]:
        alone = self.optimizer
        alone.state = defaultdict(dict, {piece: dict(state) for _, piece, state in pieces if state})
        alone.param_groups = [
            {**options, "params": [piece for group, piece, _ in pieces if group == i]}
            for i, options in enumerate(self.options)
            if any(group == i for group, _, _ in pieces)
        ]
        try:
            unhooked(type(alone))(alone)
            return [alone.state.get(piece) for _, piece, _ in pieces]
        finally:
            alone.state, alone.param_groups = defaultdict(dict), []
            for name in self.scaling:
                vars(alone).pop(name, None)


def untried(optimizer: optim.Optimizer, error: Exception) -> UpdateError:
    """A trial of its step has failed."""
    return UpdateError(
        f"{type(optimizer).__name__} can't be planned, since its step can't be tried on a dense gradient: {error}; "
        "compile without optimizer=, and its states and its update are not counted"
    )


def unhooked(kind: type[optim.Optimizer]) -> Callable[..., Any]:
    """The step of a class as it was written, without the hooks that torch puts around it."""
    step = kind.step
    return getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step


def in_place_of_step(optimizer: optim.Optimizer, run: Callable[..., Any]) -> Any:
    """`run` as the optimizer's step: a method, because schedulers take the function out of what they wrap."""

    @functools.wraps(optimizer.step)
    def step(_: optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs)

    del step.__dict__["__wrapped__"]  # is bound: GradScaler asks for the signature, which would lose a second argument
    return MethodType(step, optimizer)


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
