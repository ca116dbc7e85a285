"""Run the step of a copy of an optimizer on other tensors.

    AdamW over 300 parameters, w of 1000000 elements   ->   AdamW.step on 262144 elements of w, with gradient and states
    a class of the user, with self.beta = 0.9          ->   the same, with its own beta

No optimizer is reimplemented here: its states and the bytes that its update allocates are found by stepping on made-up
parameters.
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
from ..system.device import CPU
from ..system.profiler_thread import run_unprofiled
from ..tensors.parameter_groups import parameter_groups
from .elementwise import ELEMENTWISE, unhooked_step
from .first_state import is_torch_optimizer

StepInput = tuple[int, Tensor, Mapping[str, Any]]  # a group, a tensor with its gradient, and its state
SAMPLE_ELEMENTS = 512  # of a made-up parameter: few, since budgets count no trials
STEPS = 7  # RAdam's update takes more from the sixth on
ALIKE = (optim.Adam, optim.AdamW, optim.SGD)  # all steps but the first allocate alike
STATE_ADVICE = "keep it in the state of each parameter"
SCALING = ("grad_scale", "found_inf")  # by which a GradScaler controls a step
PLAIN_TYPES = int, float, complex, str, bytes, type(None), torch.dtype, torch.device
TORCH_FLAGS = ("_warned_capturable_if_run_uncaptured", "_need_device_dtype_check_for_fused")  # set by torch's own steps


def clone_optimizer(optimizer: optim.Optimizer, groups: list[dict[str, Any]], state: Any = None) -> optim.Optimizer:
    """Return an optimizer that steps the same, without hooks, with these groups and states (None: the optimizer's own).

    `copy.copy` would take the way of a pickle, which leaves out attributes of a class beside its groups and states.
    Attributes that may hold parameters or another optimizer are left out here, so that a trial never reaches those.
    """
    clone = type(optimizer).__new__(type(optimizer))
    vars(clone).update(plain_attributes(optimizer))
    state = optimizer.state if state is None else state
    clone.__setstate__({"defaults": dict(optimizer.defaults), "state": state, "param_groups": groups})
    return clone


def plain_attributes(optimizer: optim.Optimizer) -> dict[str, Any]:
    """Copy the plain values that an optimizer keeps beside its groups and states."""
    left_out = (*SCALING, "defaults", "state", "param_groups")
    return {
        name: _copied(value)
        for name, value in vars(optimizer).items()
        if name not in left_out and not is_hook_table(name) and _is_plain(value)
    }


def clone_nbytes(optimizer: optim.Optimizer) -> int:
    """Return the bytes of a clone's own scalar tensors."""
    return resident_bytes(leaf for leaf in tree_leaves(plain_attributes(optimizer)) if isinstance(leaf, Tensor))


def distinct_steps(optimizer: optim.Optimizer) -> int:
    """Return the number of first steps among which is one that allocates as much as any."""
    return 2 if type(optimizer) in ALIKE else STEPS


class ClonedOptimizer:
    """A copy of an optimizer, with its present options, that steps on any tensors."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        # Copies, because a scheduler writes into a learning rate that is a tensor.
        self.options = [
            {key: _copied_tensor(value) for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        self.optimizer = clone_optimizer(optimizer, [], defaultdict(dict))
        self.device = next((parameter.device for parameter in parameter_groups(optimizer)), CPU)
        self.scaling: dict[str, Any] = {name: vars(optimizer)[name] for name in SCALING if name in vars(optimizer)}

    def step(self, inputs: Sequence[StepInput]) -> list[dict[str, Any] | None]:
        """Update tensors, each with its group and its state; return the state of each, None if it has none."""
        vars(self.optimizer).update(self.scaling)
        return self._step(inputs)

    def state_dtypes(self, group: int, dtype: torch.dtype) -> dict[str, torch.dtype | None]:
        """Return the entries of a parameter's state: the dtype of an elementwise one, None for a scalar."""
        state = self._sample_state(group, dtype)
        return {
            key: value.dtype if isinstance(value, Tensor) and value.shape == (2,) else None
            for key, value in state.items()
        }

    def scalar_devices(self, group: int, dtype: torch.dtype) -> dict[str, torch.device]:
        """Return the devices of the scalar tensors in a state."""
        state = self._sample_state(group, dtype)
        return {key: value.device for key, value in state.items() if isinstance(value, Tensor) and not value.dim()}

    def shared_changes(self, group: int, dtype: torch.dtype) -> str:
        """Return what a step changes outside of the parameter and its state, as text; empty if nothing."""
        return self._sample_step(group, dtype)[1]

    def temporaries(self, group: int, dtype: torch.dtype) -> Temporaries:
        """Measure what updates allocate and free, without new states."""
        counts = [SAMPLE_ELEMENTS], [2 * SAMPLE_ELEMENTS], [SAMPLE_ELEMENTS] * 2
        one, large, two = (self._peak_nbytes(group, count, dtype) for count in counts)
        fixed, together = max(0, 2 * one - large), bool(self.options[group].get("foreach"))
        each = (large - one) / SAMPLE_ELEMENTS
        # The fixed ones may be gone when the tensors of two parameters meet.
        before = min(each, max(0, two - one + fixed) / SAMPLE_ELEMENTS)
        return Temporaries(fixed, each, before, together)

    def _sample_state(self, group: int, dtype: torch.dtype) -> dict[str, Any]:
        """The state of a parameter of two elements.

        Raises:
            UpdateError: the step failed, or changes something that parameters share.
        """
        state, why = self._sample_step(group, dtype)
        if why:
            raise UpdateError(f"{why}, and an update in windows is made of many; {STATE_ADVICE}")
        return state

    def _sample_step(self, group: int, dtype: torch.dtype) -> tuple[dict[str, Any], str]:
        before = plain_attributes(self.optimizer)
        try:
            sample = _sample(2, dtype, self.device)
            (state,) = self._step([(group, sample, initial_state(self.optimizer, self.options[group], sample))])
        except Exception as error:
            raise profiling_error(self.optimizer, error) from error
        changed = _changed_names(before, plain_attributes(self.optimizer))
        why = f"{type(self.optimizer).__name__}.{changed[0]} is another after a step" if changed else ""
        return state or {}, why

    def _peak_nbytes(self, group: int, counts: Sequence[int], dtype: torch.dtype) -> int:
        """The most that updates of made-up parameters allocate, one after the other."""
        samples, most = [_sample(count, dtype, self.device) for count in counts], 0
        states = [initial_state(self.optimizer, self.options[group], sample) for sample in samples]
        for _ in range(distinct_steps(self.optimizer)):
            inputs = [(group, sample, state) for sample, state in zip(samples, states, strict=True)]
            before = _states_nbytes(states)
            step = functools.partial(measure_peak, functools.partial(self._step, inputs), self.device)
            new_states, allocated = run_unprofiled(step)
            states = [state or {} for state in new_states]
            most = max(most, allocated.peak - (_states_nbytes(states) - before) if allocated else 0)
        return most + clone_nbytes(self.optimizer)

    def _step(self, inputs: Sequence[StepInput]) -> list[dict[str, Any] | None]:
        clone = self.optimizer
        clone.state = defaultdict(dict, {tensor: dict(state) for _, tensor, state in inputs if state})
        clone.param_groups = [
            {**options, "params": [tensor for group, tensor, _ in inputs if group == i]}
            for i, options in enumerate(self.options)
            if any(group == i for group, _, _ in inputs)
        ]
        try:
            with _scalars_on_host(clone):
                unhooked_step(type(clone))(clone)
            return [clone.state.get(tensor) for _, tensor, _ in inputs]
        finally:
            clone.state, clone.param_groups = defaultdict(dict), []
            for name in self.scaling:
                vars(clone).pop(name, None)


@dataclass(frozen=True)
class Temporaries:
    """Bytes that an update allocates and frees.

    There are `fixed` ones for each parameter, `each` for an element of it, and `before` for an element of the parameter
    before it, which stay until they are replaced.
    """

    fixed: int
    each: float
    before: float
    together: bool  # all parameters of the group at once

    def most(self, counts: Sequence[int]) -> int:
        """Return the most that an update of parameters with so many elements takes, in this order."""
        if self.together:
            return sum(self.fixed + math.ceil(self.each * count) for count in counts)
        pairs = [sorted(pair) for pair in itertools.pairwise([0, *counts])]
        return max(
            (2 * self.fixed + math.ceil(self.each * large + self.before * small) for small, large in pairs), default=0
        )


def unclonable_reason(optimizer: optim.Optimizer) -> str:
    """Return what a step changes that parameters share, so that many steps can't replace it; empty if nothing.

    Raises:
        UpdateError: it is a class of the user, and its step failed.
    """
    if type(optimizer) in ELEMENTWISE:
        return ""
    clone = ClonedOptimizer(optimizer)
    kinds = dict.fromkeys((i, parameter.dtype) for parameter, i in parameter_groups(optimizer).items())
    return next(filter(None, (clone.shared_changes(*kind) for kind in kinds)), "")


def initial_state(optimizer: optim.Optimizer, options: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
    """Return the state of a parameter before its first step."""
    if not isinstance(optimizer, optim.Adagrad):
        return {}
    # Adagrad creates it in its constructor, and in torch 2.11 not in a step.
    return dict(optim.Adagrad([{**options, "params": [parameter]}]).state[parameter])


class UntriedUpdateError(UpdateError):
    """The step of an optimizer can't be tried on made-up parameters."""


def profiling_error(optimizer: optim.Optimizer, error: Exception) -> UpdateError:
    return UntriedUpdateError(
        f"{type(optimizer).__name__} can't be planned, since its step can't be tried on a dense gradient: {error}; "
        "compile without optimizer=, and its states and its update are not counted"
    )


def _scalars_on_host(optimizer: optim.Optimizer) -> AbstractContextManager[Any]:
    """Let torch's own optimizers create their scalars on the host, as torch does from 2.13 on.

    Older versions use the default device.
    """
    own = is_torch_optimizer(type(optimizer))
    return CPU if own and torch.get_default_device().type != "cpu" else nullcontext()


def _sample(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    sample = torch.zeros(count, dtype=dtype, device=device)
    sample.grad = torch.zeros_like(sample)
    return sample


def _states_nbytes(states: Sequence[Mapping[str, Any]]) -> int:
    return resident_bytes(value for state in states for value in state.values() if isinstance(value, Tensor))


def _changed_names(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Names of the attributes that a step has changed or added."""
    same = [name for name, value in after.items() if name in before and _is_same(before[name], value)]
    return sorted({*before, *after} - {*same, *TORCH_FLAGS})


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


def is_hook_table(name: str) -> bool:
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
    return _copied_tensor(value)


def _copied_tensor(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
