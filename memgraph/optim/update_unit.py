"""Find how finely an optimizer's step may be cut.

    AdamW                                    ->   element     each depends on its own parameter, gradient and states
    Muon, Adafactor, AdamW of 8 bits         ->   parameter   one alone gets the bits that it gets among others
    a class that counts in its group         ->   all

An element is what a list of torch's classes says, or `pointwise = True` in a class. For a parameter there is a trial: a
copy of the optimizer steps on a made-up parameter in the place of each, on all together, and another copy on some of
them alone. It can refute this, and not prove it.
"""

from __future__ import annotations

import enum
import itertools
import math
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, optim

from ..system.device import CPU
from ..system.own_attributes import attributes_of
from ..system.profiler_thread import run_unprofiled
from ..tensors.parameter_groups import parameter_groups, state_tensors
from .elementwise import (
    declared_elementwise,
    has_torchs_step,
    is_elementwise,
    option_reason,
    replaced_step,
    unhooked_step,
)
from .kernel_text import kernel_text
from .parameter_kind import ParameterKind, stepped_parameters
from .step_on import Group, groups_in_place, groups_with, step_on
from .trial_copy import UntriedUpdateError, forked_draws, parts_of, trial_copy, trial_error

ELEMENTS = 8192  # of a made-up parameter; optimizers of few bits treat those with fewer than 4096 as others
FEW = 16  # of those that are not tried alone
ALIKE = 2  # parameters of a group, a dtype and a number of dimensions that are tried alone
SCALES = 1e-2, 1.0, 1e3  # of the gradients of each step: a norm over all parameters is clipped only beyond some bound
DEPTH = 4  # of objects in attributes
STATE_ADVICE = "keep it in the state of each parameter"
TORCH_FLAGS = ("_warned_capturable_if_run_uncaptured", "_need_device_dtype_check_for_fused")  # set by torch's own steps

_units: weakref.WeakKeyDictionary[optim.Optimizer, tuple[str, UpdateUnit, bool]] = weakref.WeakKeyDictionary()


class UpdateUnit(enum.Enum):
    """The least part of a step that can be made by itself."""

    ELEMENT = "element"
    PARAMETER = "parameter"
    ALL = "all"


def unit_of(optimizer: optim.Optimizer) -> UpdateUnit:
    """Return the unit of an optimizer that is no chain of others."""
    kind = type(optimizer)
    if has_torchs_step(kind) or (declared_elementwise(kind) and not is_elementwise(optimizer)):
        return UpdateUnit.ELEMENT if is_elementwise(optimizer) else UpdateUnit.ALL  # with an option that no part takes
    return _tried(optimizer)[0]


def keeps_places(optimizer: optim.Optimizer) -> bool:
    """Return True if a step on one parameter has the others in their places, without gradients.

    A step that reads every gradient without a look has that parameter alone; a trial has shown that this is the same.
    """
    kind = type(optimizer)
    return not has_torchs_step(kind) and not declared_elementwise(kind) and _tried(optimizer)[1]


def _tried(optimizer: optim.Optimizer) -> tuple[UpdateUnit, bool]:
    text = kernel_text(optimizer)
    known, unit, in_place = _units.get(optimizer, ("", UpdateUnit.ALL, False))
    if known != text:
        unit, in_place = run_unprofiled(lambda: _found_unit(optimizer))
        _units[optimizer] = text, unit, in_place
    return unit, in_place


def _found_unit(optimizer: optim.Optimizer) -> tuple[UpdateUnit, bool]:
    """Try the step of a class that torch does not have."""
    if not is_elementwise(optimizer):
        in_place = next((each for each in (True, False) if _is_separable(optimizer, each)), None)
        return (UpdateUnit.ALL, True) if in_place is None else (UpdateUnit.PARAMETER, in_place)
    try:
        is_element = _is_separable(optimizer, in_place=False) and not shared_change(optimizer)
    except UntriedUpdateError:
        is_element = False
    return UpdateUnit.ELEMENT if is_element else UpdateUnit.ALL, False


def unsupported_reason(optimizer: optim.Optimizer, trained: Callable[[Tensor], bool]) -> str | None:
    """Return why the states of an optimizer, or of a chain, can't be offloaded, with what to do, or None."""
    try:
        parts = parts_of(optimizer)
    except UntriedUpdateError as error:
        return str(error)
    for part in parts:
        if reason := option_reason(part, trained) or replaced_step(part):
            return reason
        if unit_of(part) is UpdateUnit.ALL:
            if is_elementwise(part) and (changed := shared_change(part)):
                return f"{changed}, and an update in windows is made of many; {STATE_ADVICE}"
            return (
                f"{type(part).__name__} does not update a parameter alone as it does among others, so its state can't "
                f"be offloaded; {STATE_ADVICE}, or leave state and parameters on the device"
            )
    return None


def shared_change(optimizer: optim.Optimizer) -> str:
    """Return what a step changes beside parameters and their states, as text; empty if nothing.

    Raises:
        UntriedUpdateError: it is a class of the user, and its step failed.
    """
    if has_torchs_step(type(optimizer)):
        return ""
    with _undone(optimizer):
        trial = _Trial(optimizer, _samples(optimizer))
        before = {name: [_copied(value) for value in values] for name, values in trial.shared().items()}
        try:
            trial.step(1.0)
        except Exception as error:
            raise trial_error(optimizer, error) from error
        after = trial.shared()
    changed = (name for name in {**before, **after} if not _equal(before.get(name, []), after.get(name, [])))
    return next((f"{type(optimizer).__name__}.{name} is another after a step" for name in changed), "")


def _is_separable(optimizer: optim.Optimizer, in_place: bool) -> bool:
    """Return True if made-up parameters get the same bits together and apart.

    Once the first of them has no gradient, and once one without numbers: a step may skip all, or step on all.
    """
    if not (samples := _samples(optimizer)):
        return is_elementwise(optimizer)
    try:
        with _undone(optimizer), torch.compiler.set_stance("force_eager"):
            whole, parts = _Trial(optimizer, samples), _Trial(optimizer, samples, in_place)
            for scale in SCALES:
                whole.step(scale)
                parts.step(scale, apart=True)
            if not _equal(whole.facts(), parts.facts()):
                return False
            try:
                whole.step(1.0, first=1)
            except Exception:  # a step that reads every gradient without a look has them all
                return True
            parts.step(1.0, first=1, apart=True)
            if not _equal(whole.facts(), parts.facts()):
                return False
            with suppress(Exception):  # to raise where a gradient is no number is no reason
                whole.step(1.0, of_first=math.inf)
                parts.step(1.0, of_first=math.inf, apart=True)
                return _equal(whole.facts(), parts.facts())
            return True
    except Exception:  # whatever a class raises: then its step isn't cut
        return False


@contextmanager
def _undone(optimizer: optim.Optimizer) -> Iterator[None]:
    """Take back what trials change in the class and the generator, which their copies share with the user's own."""
    kind = type(optimizer)
    before = {name: value for name, value in vars(kind).items() if isinstance(value, int | float | str)}
    device = next((parameter.device for parameter in parameter_groups(optimizer)), CPU)
    with forked_draws(device):
        try:
            yield
        finally:
            for name, value in before.items():
                if vars(kind).get(name) is not value:
                    setattr(kind, name, value)


class _Trial:
    """A copy of an optimizer over made-up parameters."""

    def __init__(self, optimizer: optim.Optimizer, samples: dict[Tensor, Tensor], in_place: bool = False) -> None:
        self.in_place = in_place
        self.parameters = {parameter: sample.clone().requires_grad_() for parameter, sample in samples.items()}
        self.gradients = [sample.neg() for sample in samples.values()]
        self.alone = [i for i, parameter in enumerate(samples) if parameter in _alone(optimizer)]
        self.optimizer = trial_copy(optimizer, self.parameters)

    def step(self, scale: float, first: int = 0, of_first: float = 1.0, apart: bool = False) -> None:
        """Step on the parameters from the `first` one on, together or `apart`, with gradients of this scale."""
        torch.manual_seed(0)
        own, every = list(self.parameters.values()), set(range(first, len(self.parameters)))
        gradients = [gradient * scale for gradient in self.gradients]
        gradients[0] = gradients[0] * of_first
        alone = every.intersection(self.alone)
        for stepped in [*({i} for i in sorted(alone)), every - alone] if apart else [every]:
            for i, parameter in enumerate(own):
                parameter.grad = gradients[i].clone() if i in stepped else None
            if not apart:
                unhooked_step(type(self.optimizer))(self.optimizer)
            elif stepped:
                step_on(self.optimizer, self._groups([own[i] for i in sorted(stepped)]))

    def _groups(self, stepped: list[Tensor]) -> list[Group]:
        groups, numbers = self.optimizer.param_groups, parameter_groups(self.optimizer)
        if self.in_place:
            return groups_in_place(groups)
        return groups_with(groups, {parameter: numbers[parameter] for parameter in stepped})

    def facts(self) -> list[Any]:
        """Return everything that a step may have changed."""
        tensors = *(parameter.detach() for parameter in self.parameters.values()), *state_tensors(self.optimizer)
        return [*tensors, *(value for values in self.shared().values() for value in values)]

    def shared(self) -> dict[str, list[Any]]:
        """Return the values that all parameters share, by the names of attributes."""
        own = {id(parameter) for parameter in self.parameters.values()}
        kept = {name: value for name, value in vars(self.optimizer).items() if name not in ("state", *TORCH_FLAGS)}
        kept["state"] = {key: value for key, value in self.optimizer.state.items() if not isinstance(key, Tensor)}
        kept |= {n: v for n, v in vars(type(self.optimizer)).items() if not n.startswith("__") and not callable(v)}
        kept["param_groups"] = [{**group, "params": ()} for group in self.optimizer.param_groups]
        return {name: [each for each in _values(value, DEPTH) if id(each) not in own] for name, value in kept.items()}


def _samples(optimizer: optim.Optimizer) -> dict[Tensor, Tensor]:
    """Make up a parameter for each: a class may go by places and by their number."""
    alone = _alone(optimizer)
    parameters = itertools.chain.from_iterable(stepped_parameters(optimizer))
    return {p: _sample(i, p, ELEMENTS if p in alone else FEW) for i, p in enumerate(parameters)}


def _alone(optimizer: optim.Optimizer) -> set[Tensor]:
    """Return some parameters of each group, dtype and number of dimensions."""
    counts = Counter[tuple[int, int, torch.dtype]]()
    found = set[Tensor]()
    for i, row in enumerate(stepped_parameters(optimizer)):
        for parameter in row:
            kind = i, parameter.dim(), parameter.dtype
            counts[kind] += 1
            if counts[kind] <= ALIKE:
                found.add(parameter)
    return found


def _sample(seed: int, parameter: Tensor, elements: int) -> Tensor:
    kind = ParameterKind.of(0, parameter).within(elements)
    values = torch.randn(kind.shape, generator=torch.Generator().manual_seed(seed))
    return values.to(parameter.device, parameter.dtype)


def _values(value: Any, depth: int) -> Iterator[Any]:
    """Yield numbers, words and tensors in a value, and in the objects that it holds."""
    if isinstance(value, Tensor | bool | int | float | complex | str | None):
        yield value
    elif isinstance(value, np.ndarray | np.generic | itertools.count):
        yield repr(value)
    elif depth:
        pairs = value.items() if isinstance(value, dict) else ()
        items = value if isinstance(value, list | tuple | deque) else [each for pair in pairs for each in pair]
        for each in (*items, *(attributes_of(value) or {}).values()):
            yield from _values(each, depth - 1)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _equal(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(_is_same, one, other))


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        return bool(((one == other) | ((one != one) & (other != other))).all())  # two that are no numbers are alike
    return type(one) is type(other) and bool(one == other)
