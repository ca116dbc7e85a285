"""Find what the update of each parameter reads and writes, and where that lies.

w: AdamW, gradient in memory, states on disk   ->   a parameter   in memory
                                                    its gradient  in memory
                                                    exp_avg       file 7 at 0
                                                    exp_avg_sq    file 7 at 4194304
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, optim

from ..errors import UpdateError
from ..storage.mapped_storage import (
    BufferLocation,
    BufferSlice,
    MappedBuffer,
    TensorSpec,
    buffer_slice_of,
    tensor_spec_of,
)
from ..storage.transfer import begin_reload
from ..tensors.aliasing import address_range
from ..tensors.layout import is_dense
from .elementwise import is_exact
from .optimizer_clone import ClonedOptimizer
from .window_plan import WindowRow

Whose = Callable[[Tensor], bool]  # of a parameter

PARAMETER, GRADIENT = "a parameter", "its gradient"  # beside the names of states, which are words without a space


@dataclass
class UpdateOperand:
    """One tensor that an update reads, as pieces are cut from it."""

    tensor: Tensor
    place: BufferSlice | None  # where its pieces have to be moved from and to; None: they are used where they are
    order: tuple[int, ...]  # of its dimensions, as the parameter's lie in memory
    written: bool
    owner: Tensor | None = None  # what everybody else knows these bytes by, if that is another tensor

    def __post_init__(self) -> None:
        self.ordered = self.tensor.detach().permute(self.order)
        self.flat = self.ordered.view(-1) if self.ordered.is_contiguous() else None

    @property
    def known(self) -> Tensor:
        """The tensor that everybody else has."""
        return self.tensor if self.owner is None else self.owner

    def source(self, whole: bool) -> BufferSlice | None:
        """Where its pieces are moved from and to as runs of bytes."""
        return self.place if whole or self.flat is not None else None

    def roomy(self, whole: bool) -> bool:
        """Whether its pieces want room in the window."""
        return self.place is not None or (self.flat is None and not whole)


@dataclass
class ParameterUpdate:
    """A parameter in an update."""

    parameter: Tensor
    group: int
    state: dict[str, Any]
    entries: Mapping[str, torch.dtype | None]
    strands: dict[str, UpdateOperand] = field(default_factory=dict)
    fresh: dict[str, UpdateOperand] = field(default_factory=dict)  # states that are being made
    scalars: dict[str, Any] = field(default_factory=dict)  # states that are one for all elements, as they will be
    numbers: Mapping[str, torch.device] = field(default_factory=dict)  # where such belong, if they are made elsewhere
    keys: tuple[str, ...] = ()  # of the state, once it was updated
    left: int = 0  # pieces that are not yet done
    hosted: bool = False  # the host updates it

    @property
    def missing(self) -> dict[str, torch.dtype]:
        """The states with an element for each of the parameter's that its update will make."""
        return {key: dtype for key, dtype in self.entries.items() if dtype and self.state.get(key) is None}

    @property
    def there(self) -> list[str]:
        """The states with an element for each of the parameter's that it has."""
        shape, known = self.parameter.shape, self.entries
        return [key for key, value in self.state.items() if known.get(key) is not None and _shape_of(value) == shape]

    def takes(self, gradient: Tensor | None) -> None:
        """From now on this is its gradient; None: one is yet to come, which may lie in another way than it does."""
        if gradient is None:
            gradient = torch.empty((), dtype=self.parameter.dtype, device="meta").expand(self.parameter.shape)
        self.strands[GRADIENT] = UpdateOperand(
            gradient, buffer_slice_of(gradient), order_of(self.parameter), written=False
        )

    @property
    def row(self) -> WindowRow:
        strands = self.strands.values()
        moved = tuple(strand.tensor.dtype.itemsize for strand in strands if strand.roomy(whole=False))
        resident = tuple(strand.tensor.dtype.itemsize for strand in strands if not strand.roomy(whole=False))
        fresh = tuple(dtype.itemsize for dtype in self.missing.values())
        return WindowRow(self.parameter.numel(), moved, resident, fresh, is_exact(self.parameter, self.hosted))


def parameter_updates(
    optimizer: optim.Optimizer,
    stepper: ClonedOptimizer,
    far_states: Whose,
    where: BufferLocation,
    awaited: bool = False,
) -> list[ParameterUpdate]:
    """The parameters that have a gradient, or all, if gradients are `awaited`. States that belong on disk are there
    then.

    Raises:
        SpillError: the disk does not take them.
        UpdateError: two tensors lie on one place.
    """
    entries: dict[tuple[int, torch.dtype], dict[str, torch.dtype | None]] = {}
    found = []
    for i, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if awaited or parameter.grad is not None:
                kind = i, parameter.dtype
                if kind not in entries:
                    entries[kind] = stepper.entries(*kind)
                found.append(ParameterUpdate(parameter, i, optimizer.state.get(parameter, {}), entries[kind]))
    _bring_states_home([subject for subject in found if far_states(subject.parameter)], where)
    for subject in found:
        subject.strands = _strands(subject)
        subject.takes(None if awaited else subject.parameter.grad)
    _refuse_shared(found)
    return found


def make_places(subjects: Sequence[ParameterUpdate], far_states: Whose, where: BufferLocation) -> None:
    """Make room for states that do not exist yet.

    Raises:
        SpillError: the disk has none.
    """
    far = []
    for subject in subjects:
        for key, dtype in subject.missing.items():
            form = _form_beside(subject.parameter, dtype)
            if far_states(subject.parameter) and form.nbytes:
                far.append((subject, key, form))
            elif subject.left > 1:  # else the update makes it whole
                device = subject.parameter.device
                made = torch.empty_strided(form.shape, form.strides, dtype=form.dtype, device=device)
                subject.fresh[key] = new_operand(made)
    if far:
        home = MappedBuffer([form for *_, form in far], where)
        for i, (subject, key, _) in enumerate(far):
            subject.fresh[key] = new_operand(home.tensor(i), home.place(i))


def new_operand(tensor: Tensor, place: BufferSlice | None = None) -> UpdateOperand:
    """A state that the update makes."""
    return UpdateOperand(tensor, place, order_of(tensor), written=True)


def order_of(tensor: Tensor) -> tuple[int, ...]:
    """The dimensions of a tensor as they lie in memory, or as they are where elements leave gaps."""
    order, strides = range(tensor.dim()), tensor.stride()
    return tuple(sorted(order, key=lambda i: -strides[i]) if is_dense(tensor) else order)


def _form_beside(parameter: Tensor, dtype: torch.dtype) -> TensorSpec:
    """What lies in memory as a parameter does, without its gaps."""
    alike = torch.empty_like(parameter, device="meta", dtype=dtype, memory_format=torch.preserve_format)
    return tensor_spec_of(alike)


def _bring_states_home(subjects: Sequence[ParameterUpdate], where: BufferLocation) -> None:
    """Move states that are in memory to disk, as they are after `load_state_dict`."""
    near = []
    for subject in subjects:
        for key in subject.there:
            tensor = subject.state[key]
            if tensor.numel() and is_dense(tensor) and buffer_slice_of(tensor) is None:
                near.append((subject.state, key))
    for (state, key), tensor in zip(near, begin_reload([state[key] for state, key in near], where), strict=True):
        state[key] = tensor


def _strands(subject: ParameterUpdate) -> dict[str, UpdateOperand]:
    """The parameter and its states."""
    parameter = subject.parameter
    tensors = {PARAMETER: parameter, **{key: subject.state[key] for key in subject.there}}
    order = order_of(parameter)
    return {
        name: UpdateOperand(tensor, buffer_slice_of(tensor), order, written=True) for name, tensor in tensors.items()
    }


def _refuse_shared(subjects: Sequence[ParameterUpdate]) -> None:
    """A window reads before the one before it has been written, so nothing may lie on the place of something else."""
    ends = []
    for subject in subjects:
        for name, strand in subject.strands.items():
            if strand.tensor.numel():
                what = f"{name} of shape {tuple(subject.parameter.shape)}"
                ends.append((*address_range(strand.tensor), strand.place is not None, what))
    until, far = 0, False
    for begin, end, away, what in sorted(ends):
        if begin < until and (away or far):
            raise UpdateError(f"{what} shares its home with another tensor; let one Parameter stand for both")
        far = away or (far and begin < until)
        until = max(until, end)


def _shape_of(value: Any) -> torch.Size | None:
    return value.shape if isinstance(value, Tensor) else None


def no_operands(_: Tensor) -> bool:
    """Whose: none of the parameters."""
    return False
