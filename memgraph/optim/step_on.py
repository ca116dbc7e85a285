"""Step on some parameters by the user's own optimizer, as if it had no others and they were only what is in a window.

    AdamW over 300 parameters, 262144 elements of w   ->   a tensor of these elements stands for w; AdamW.step
    Muon over 48 matrices, all of w                   ->   w, its gradient and its momentum are those in the window;
                                                           the others are in their places, without gradients

The object is not copied: it may have attributes that a copy would not have.  A class that is no function of elements
may keep tables by parameter or by its place among the others, so a whole parameter stays itself, where it is.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, optim

from ..errors import UpdateError
from ..system.device import CPU
from ..tensors.state_leaves import StateLeaf, state_leaves
from .elementwise import unhooked_step
from .update_operands import GRADIENT, PARAMETER, UpdateOperand
from .window_views import WindowView, WriteBack, range_of, view

Group = dict[str, Any]
SCALING = ("grad_scale", "found_inf")  # by which a GradScaler controls a step
ADVICE = "it is between two steps now: load an earlier state, and compile with a budget that holds everything"


@dataclass
class StepOutcome:
    """Facts of a step beside its updates: the value that it returned, and the gradients that it took away."""

    value: Any = None
    cleared: set[Tensor] = field(default_factory=set)


def step_on(optimizer: optim.Optimizer, groups: list[Group], **kwargs: Any) -> Any:
    """Run the optimizer's step, without hooks, with these groups in place of its own; return what it returns."""
    own, optimizer.param_groups = optimizer.param_groups, groups
    try:
        return unhooked_step(type(optimizer))(optimizer, **kwargs)
    finally:
        optimizer.param_groups = own


def groups_with(groups: Sequence[Group], parameters: Mapping[Tensor, int]) -> list[Group]:
    """Return those of the groups that have any of these parameters, each with its number, and no others in them."""
    return [
        {**group, "params": kept}
        for i, group in enumerate(groups)
        if (kept := [parameter for parameter, number in parameters.items() if number == i])
    ]


def groups_in_place(groups: Sequence[Group]) -> list[Group]:
    """Return copies of the groups with all of their parameters: those without gradients are not stepped on."""
    return [{**group, "params": [*group["params"]]} for group in groups]


def step_window(
    optimizer: optim.Optimizer, groups: Sequence[Group], views: Sequence[WindowView], outcome: StepOutcome,
    in_place: bool = False,
) -> list[WriteBack]:  # fmt: skip
    """Step on the parameters of a window; return what has to be copied to the tier beside what was filled.

    With `in_place` all others are in their places, without gradients.

    Raises:
        UpdateError: the step changes an option, or makes a state that its first step has not made.
    """
    placed = [_PlacedWindow(optimizer, each) for each in views]
    stepped = {each.stepped: each.update.group for each in placed}
    given = groups_in_place(groups) if in_place else groups_with(groups, stepped)
    before = [dict(group) for group in given]
    try:
        outcome.value = step_on(optimizer, given)
    except BaseException:
        for each in placed:
            each.undo_state()
        raise
    finally:
        for each in placed:
            each.restore_parameter(outcome)
    _refuse_changed_options(optimizer, before, given)
    return [write for each in placed for write in each.store()]


@contextmanager
def without_gradients(groups: Sequence[Group], cleared: Collection[Tensor]) -> Iterator[None]:
    """Take all gradients away, and give back those that the step has not `cleared`."""
    gradients = {parameter: parameter.grad for group in groups for parameter in group["params"]}
    for parameter in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients.items():
            if parameter not in cleared:
                parameter.grad = gradient


def _refuse_changed_options(optimizer: optim.Optimizer, before: Sequence[Group], after: Sequence[Group]) -> None:
    for old, new in zip(before, after, strict=True):
        for key in old.keys() | new.keys():
            one, other = old.get(key), new.get(key)
            if one is not other and (
                isinstance(one, Tensor | list) or isinstance(other, Tensor | list) or one != other
            ):
                raise UpdateError(
                    f"{type(optimizer).__name__} changes the option {key!r} of a group in a step, and an update in "
                    f"windows is made of many; {ADVICE}"
                )


class _PlacedWindow:
    """A window as a step finds it, and what was there before.

    Attributes:
        stepped: what stands for the parameter in groups and states, or the parameter itself if it is not cut.
    """

    def __init__(self, optimizer: optim.Optimizer, window: WindowView) -> None:
        self.optimizer, self.window, self.update = optimizer, window, window.update
        parameter, given = self.update.parameter, window.tensors[PARAMETER]
        self.stepped, self.given = parameter if self.update.whole else given, given.detach()
        self.data, state = parameter.data, optimizer.state.get(parameter, {})
        leaves = list(state_leaves(state))
        self.known = {leaf.name for leaf in leaves}
        self.leaves: list[StateLeaf] = []
        if self.update.whole:
            self.leaves = [leaf for leaf in leaves if leaf.name in window.moved]
            for leaf in self.leaves:
                leaf.put(window.tensors[leaf.name])
            parameter.data = given
        elif state:
            optimizer.state[self.stepped] = self._part(state, leaves)
        self.stepped.grad = window.tensors[GRADIENT]

    def _part(self, state: dict[str, Any], leaves: Sequence[StateLeaf]) -> dict[str, Any]:
        """Return the state of the elements: their own tensors, and copies of all else."""
        given = self.window.tensors
        memo: dict[int, Any] = {id(leaf.tensor): given[leaf.name] for leaf in leaves if leaf.name in given}
        for value in state.values():
            if isinstance(value, Tensor) and not value.dim():
                memo[id(value)] = value.to(CPU, copy=True) if self.update.on_host else value.clone()
        return copy.deepcopy(state, memo)

    def restore_parameter(self, outcome: StepOutcome) -> None:
        """Put the parameter back; a step may have given it other memory, or taken its gradient away."""
        if self.stepped.data_ptr() != self.given.data_ptr() and self.stepped.shape == self.given.shape:
            self.given.copy_(self.stepped.detach())
        self.window.tensors[PARAMETER] = self.given
        if self.stepped.grad is None:
            outcome.cleared.add(self.update.parameter)
        self.stepped.grad = None
        if self.update.whole:
            self.update.parameter.data = self.data

    def undo_state(self) -> None:
        """Give a state the tensors that it had."""
        for leaf in self.leaves:
            leaf.put(leaf.tensor)
        if not self.update.whole:
            self.optimizer.state.pop(self.stepped, None)

    def store(self) -> list[WriteBack]:
        """Keep what the step has made of the state, and return the new tensors that go to the tier."""
        states, chunk, writes = self.optimizer.state, self.window.chunk, list[WriteBack]()
        state = states.get(self.stepped, {}) if self.update.whole else states.pop(self.stepped, {})
        operands = {**self.update.operands, **self.update.new_states}
        for leaf in list(state_leaves(state)):
            if (operand := operands.get(leaf.name)) is not None:
                writes += self._store_leaf(leaf, operand)
            elif leaf.name not in self.known and not chunk.whole and leaf.tensor.shape == self.given.shape:
                raise UpdateError(
                    f"{type(self.optimizer).__name__} makes the state {leaf.name!r} in a later step than its first, "
                    f"which was tried, so it is not known how to cut it; {ADVICE}"
                )
        if not self.update.whole and self.window.is_last and (state or self.update.parameter in states):
            self._merge(states[self.update.parameter], state)
        return writes

    def _store_leaf(self, leaf: StateLeaf, operand: UpdateOperand) -> list[WriteBack]:
        window, chunk, writes = self.window, self.window.chunk, list[WriteBack]()
        if leaf.tensor is operand.public_tensor:
            return []
        given = (window.moved if self.update.whole else window.tensors).get(leaf.name)
        place = view(operand, chunk) if given is None else given
        if leaf.tensor is not place:
            if leaf.tensor.shape != place.shape or leaf.tensor.dtype != place.dtype:
                return []  # it stays on the device
            if given is None and operand.slice is not None and leaf.tensor.stride() == place.stride():
                writes.append((range_of(operand.slice, chunk, place.dtype), leaf.tensor))
            else:
                place.copy_(leaf.tensor)
        leaf.put(operand.public_tensor)
        return writes

    def _merge(self, own: dict[str, Any], state: dict[str, Any]) -> None:
        """Give the parameter's own state the values of its last part."""
        for key in [key for key in own if key not in state]:
            del own[key]
        for key, value in state.items():
            before, device = own.get(key), self.update.scalar_devices.get(key)
            is_number = isinstance(value, Tensor) and not value.dim()
            if is_number and isinstance(before, Tensor) and before.dtype == value.dtype:
                before.copy_(value)
            else:
                own[key] = value.to(device) if is_number and device is not None else value
