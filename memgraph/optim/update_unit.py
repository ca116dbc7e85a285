"""Find how finely an optimizer's step may be cut.

    AdamW                                    ->   element     each depends on its own parameter, gradient and states
    Muon, Adafactor, AdamW of 8 bits         ->   parameter   one alone gets the bits that it gets among others
    a class that counts in its group         ->   all

An element is what a list of torch's classes says, or `pointwise = True` in a class. For a parameter there is a trial: a
copy of the optimizer steps on made-up parameters together, and another one on each of them alone. It can refute this,
and not prove it.
"""

from __future__ import annotations

import enum
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Set
from typing import Any

import torch
from torch import Tensor, optim

from ..system.profiler_thread import run_unprofiled
from ..tensors.parameter_groups import state_tensors
from .elementwise import declared_elementwise, is_elementwise, option_reason
from .optimizer_clone import STATE_ADVICE, UntriedUpdateError
from .optimizer_profiler import ParameterKind, kernel_text, stepped_parameters
from .trial_copy import parts_of, trial_copy

ELEMENTS = 8192  # of a made-up parameter; optimizers of few bits treat those with fewer than 4096 as others
ALIKE = 2  # parameters of a group with as many dimensions, which are tried together
SCALES = 1e-2, 1.0, 1e3  # of the gradients of each step: a norm over all parameters is clipped only beyond some bound
DEPTH = 4  # of objects in attributes

_units: weakref.WeakKeyDictionary[optim.Optimizer, tuple[str, UpdateUnit]] = weakref.WeakKeyDictionary()


class UpdateUnit(enum.Enum):
    """The least part of a step that can be made by itself."""

    ELEMENT = "element"
    PARAMETER = "parameter"
    ALL = "all"


def unit_of(optimizer: optim.Optimizer) -> UpdateUnit:
    """Return the unit of an optimizer that is no chain of others."""
    if is_elementwise(optimizer):
        return UpdateUnit.ELEMENT
    if declared_elementwise(type(optimizer)):  # with an option that no update of parts takes
        return UpdateUnit.ALL
    options = kernel_text(optimizer)
    known, unit = _units.get(optimizer, ("", UpdateUnit.ALL))
    if known != options:
        unit = UpdateUnit.PARAMETER if run_unprofiled(lambda: _is_separable(optimizer)) else UpdateUnit.ALL
        _units[optimizer] = options, unit
    return unit


def unsupported_reason(optimizer: optim.Optimizer, trained: Callable[[Tensor], bool]) -> str | None:
    """Return why the states of an optimizer, or of a chain, can't be offloaded, with what to do, or None."""
    try:
        parts = parts_of(optimizer)
    except UntriedUpdateError as error:
        return str(error)
    for part in parts:
        if reason := option_reason(part, trained):
            return reason
        if unit_of(part) is UpdateUnit.ALL:
            return (
                f"{type(part).__name__} does not update a parameter alone as it does among others, so its state can't "
                f"be offloaded; {STATE_ADVICE}, or leave state and parameters on the device"
            )
    return None


def _is_separable(optimizer: optim.Optimizer) -> bool:
    """Return True if made-up parameters get the same bits together and one by one."""
    samples = {parameter: _sample(i, parameter) for i, parameter in enumerate(_chosen(optimizer))}
    if not samples:
        return False
    try:
        with torch.random.fork_rng(), torch.compiler.set_stance("force_eager"):
            whole, parts = _Trial(optimizer, samples), _Trial(optimizer, samples)
            for scale in SCALES:
                torch.manual_seed(0)
                whole.step(samples.keys(), scale)
                torch.manual_seed(0)
                for parameter in samples:
                    parts.step({parameter}, scale)
    except Exception:  # whatever a class raises: then its step isn't cut
        return False
    return _equal(whole.facts(), parts.facts())


class _Trial:
    """A copy of an optimizer over made-up parameters."""

    def __init__(self, optimizer: optim.Optimizer, samples: dict[Tensor, Tensor]) -> None:
        self.parameters = {parameter: sample.clone().requires_grad_() for parameter, sample in samples.items()}
        self.gradients = [sample.neg() for sample in samples.values()]
        self.optimizer = trial_copy(optimizer, self.parameters)

    def step(self, stepped: Set[Tensor], scale: float) -> None:
        """Step on these parameters alone."""
        for i, (parameter, own) in enumerate(self.parameters.items()):
            own.grad = self.gradients[i] * scale if parameter in stepped else None
        type(self.optimizer).step(self.optimizer)

    def facts(self) -> list[Any]:
        """Return everything that a step may have changed."""
        tensors = *(parameter.detach() for parameter in self.parameters.values()), *state_tensors(self.optimizer)
        options = [{**group, "params": ()} for group in self.optimizer.param_groups]
        kept = {name: value for name, value in vars(self.optimizer).items() if name not in ("state", "param_groups")}
        return [*tensors, *_values([options, kept], DEPTH)]


def _chosen(optimizer: optim.Optimizer) -> Iterator[Tensor]:
    """Yield some parameters of each group, dtype and number of dimensions."""
    counts = Counter[tuple[int, int, torch.dtype]]()
    for i, row in enumerate(stepped_parameters(optimizer)):
        for parameter in row:
            kind = i, parameter.dim(), parameter.dtype
            counts[kind] += 1
            if counts[kind] <= ALIKE:
                yield parameter


def _sample(seed: int, parameter: Tensor) -> Tensor:
    kind = ParameterKind.of(0, parameter).within(ELEMENTS)
    values = torch.randn(kind.shape, generator=torch.Generator().manual_seed(seed))
    return values.to(parameter.device, parameter.dtype)


def _values(value: Any, depth: int) -> Iterator[Any]:
    """Yield numbers, words and tensors in a value, and in the objects that it holds."""
    if isinstance(value, Tensor | bool | int | float | complex | str | None):
        yield value
    elif depth:
        pairs = value.items() if isinstance(value, dict) else ()
        items = value if isinstance(value, list | tuple) else [each for pair in pairs for each in pair]
        for each in (*items, *getattr(value, "__dict__", {}).values()):
            yield from _values(each, depth - 1)


def _equal(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(_is_same, one, other))


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)
