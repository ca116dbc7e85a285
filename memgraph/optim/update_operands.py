"""Find the tensors that the update of each parameter reads and writes, and where they are.

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
from ..storage.transfer import offload_tensors
from ..tensors.aliasing import address_range
from ..tensors.layout import is_dense
from .elementwise import is_exact
from .optimizer_clone import ClonedOptimizer
from .window_plan import WindowRow

ParameterPredicate = Callable[[Tensor], bool]

PARAMETER, GRADIENT = "a parameter", "its gradient"  # beside the names of states, which are words without a space


@dataclass
class UpdateOperand:
    """One tensor of an update, from which chunks are taken."""

    tensor: Tensor
    slice: BufferSlice | None  # that chunks are copied from and to; None: they are used where they are
    order: tuple[int, ...]  # of its dimensions, so that elements come in the order of the parameter's memory
    written: bool
    owner: Tensor | None = None  # the user's tensor over the same bytes, if it is another one

    def __post_init__(self) -> None:
        self.ordered = self.tensor.detach().permute(self.order)
        self.flat = self.ordered.view(-1) if self.ordered.is_contiguous() else None

    @property
    def public_tensor(self) -> Tensor:
        """The tensor that the user has."""
        return self.tensor if self.owner is None else self.owner

    def copied_slice(self, whole: bool) -> BufferSlice | None:
        """Return the slice if chunks are copied as contiguous bytes; else they are gathered row by row."""
        return self.slice if whole or self.flat is not None else None

    def needs_buffer(self, whole: bool) -> bool:
        """Return True if chunks need bytes in the window."""
        return self.slice is not None or (self.flat is None and not whole)


@dataclass
class ParameterUpdate:
    """The update of one parameter."""

    parameter: Tensor
    group: int
    state: dict[str, Any]
    state_dtypes: Mapping[str, torch.dtype | None]  # None for a scalar
    operands: dict[str, UpdateOperand] = field(default_factory=dict)
    new_states: dict[str, UpdateOperand] = field(default_factory=dict)
    scalars: dict[str, Any] = field(default_factory=dict)  # of the state, after the update
    scalar_devices: Mapping[str, torch.device] = field(default_factory=dict)  # of those to move there after it
    keys: tuple[str, ...] = ()  # of the state, after the update
    chunks_left: int = 0
    on_host: bool = False

    @property
    def missing_states(self) -> dict[str, torch.dtype]:
        """The elementwise states that the update will create."""
        return {key: dtype for key, dtype in self.state_dtypes.items() if dtype and self.state.get(key) is None}

    @property
    def existing_states(self) -> list[str]:
        """The elementwise states that exist."""
        return [
            key
            for key, value in self.state.items()
            if self.state_dtypes.get(key) and isinstance(value, Tensor) and value.shape == self.parameter.shape
        ]

    def set_gradient(self, gradient: Tensor | None) -> None:
        """Use this gradient; None: one will come, with any strides."""
        if gradient is None:
            gradient = torch.empty((), dtype=self.parameter.dtype, device="meta").expand(self.parameter.shape)
        self.operands[GRADIENT] = UpdateOperand(
            gradient, buffer_slice_of(gradient), order_of(self.parameter), written=False
        )

    @property
    def row(self) -> WindowRow:
        buffered, resident = (
            tuple(operand.tensor.itemsize for operand in self.operands.values() if operand.needs_buffer(False) is side)
            for side in (True, False)
        )
        created = tuple(dtype.itemsize for dtype in self.missing_states.values())
        return WindowRow(self.parameter.numel(), buffered, resident, created, is_exact(self.parameter, self.on_host))


def parameter_updates(
    optimizer: optim.Optimizer, clone: ClonedOptimizer, offloaded: ParameterPredicate, location: BufferLocation,
    gradient_order: Sequence[Tensor] = (),
) -> list[ParameterUpdate]:  # fmt: skip
    """Return an update for each parameter with a gradient.

    If gradients come one by one, `gradient_order` has all parameters, in that order. Existing states of `offloaded`
    parameters are offloaded first.

    Raises:
        SpillError: the disk does not take them.
        UpdateError: two tensors share memory.
    """
    order = {parameter: i for i, parameter in enumerate(gradient_order)}
    dtypes: dict[tuple[int, torch.dtype], dict[str, torch.dtype | None]] = {}
    updates = []
    for i, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if order or parameter.grad is not None:
                kind = i, parameter.dtype
                if kind not in dtypes:
                    dtypes[kind] = clone.state_dtypes(*kind)
                updates.append(ParameterUpdate(parameter, i, optimizer.state.get(parameter, {}), dtypes[kind]))
    _offload_states([update for update in updates if offloaded(update.parameter)], location)
    for update in updates:
        update.operands = _operands(update)
        update.set_gradient(None if order else update.parameter.grad)
    _refuse_shared(updates)
    return sorted(updates, key=lambda update: order.get(update.parameter, 0))


def allocate_new_states(
    updates: Sequence[ParameterUpdate], offloaded: ParameterPredicate, location: BufferLocation
) -> None:
    """Allocate the states that updates will create.

    Raises:
        SpillError: the disk has no space for them.
    """
    to_tier = []
    for update in updates:
        for key, dtype in update.missing_states.items():
            spec = _spec_beside(update.parameter, dtype)
            if offloaded(update.parameter) and spec.nbytes:
                to_tier.append((update, key, spec))
            elif update.chunks_left > 1:  # else the optimizer's step creates it whole
                device = update.parameter.device
                update.new_states[key] = new_operand(
                    torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype, device=device)
                )
    if to_tier:
        buffer = MappedBuffer([spec for *_, spec in to_tier], location)
        for i, (update, key, _) in enumerate(to_tier):
            update.new_states[key] = new_operand(buffer.tensor(i), buffer.slice(i))


def new_operand(tensor: Tensor, slice: BufferSlice | None = None) -> UpdateOperand:
    """Return the operand of a state that the update creates."""
    return UpdateOperand(tensor, slice, order_of(tensor), written=True)


def order_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the dimensions of a dense tensor in the order of its memory; as they are if elements leave gaps."""
    order, strides = range(tensor.dim()), tensor.stride()
    return tuple(sorted(order, key=lambda i: -strides[i]) if is_dense(tensor) else order)


def no_parameters(_: Tensor) -> bool:
    """A predicate that holds for no parameter."""
    return False


def _spec_beside(parameter: Tensor, dtype: torch.dtype) -> TensorSpec:
    """The layout of a parameter without its gaps."""
    state = torch.empty_like(parameter, device="meta", dtype=dtype, memory_format=torch.preserve_format)
    return tensor_spec_of(state)


def _offload_states(updates: Sequence[ParameterUpdate], location: BufferLocation) -> None:
    """Offload states that are in memory, as they are after `load_state_dict`."""
    resident = []
    for update in updates:
        for key in update.existing_states:
            tensor = update.state[key]
            if tensor.numel() and is_dense(tensor) and buffer_slice_of(tensor) is None:
                resident.append((update.state, key))
    mapped = offload_tensors([state[key] for state, key in resident], location)
    for (state, key), tensor in zip(resident, mapped, strict=True):
        state[key] = tensor


def _operands(update: ParameterUpdate) -> dict[str, UpdateOperand]:
    """The parameter and its states."""
    tensors = {PARAMETER: update.parameter, **{key: update.state[key] for key in update.existing_states}}
    order = order_of(update.parameter)
    return {
        name: UpdateOperand(tensor, buffer_slice_of(tensor), order, written=True) for name, tensor in tensors.items()
    }


def _refuse_shared(updates: Sequence[ParameterUpdate]) -> None:
    """Refuse overlapping memory: a window is read before the one before it has been written."""
    spans = []
    for update in updates:
        for name, operand in update.operands.items():
            if operand.tensor.numel():
                what = f"{name} of shape {tuple(update.parameter.shape)}"
                spans.append((*address_range(operand.tensor), operand.slice is not None, what))
    last_end, any_offloaded = 0, False
    for begin, end, is_offloaded, what in sorted(spans):
        if begin < last_end and (is_offloaded or any_offloaded):
            raise UpdateError(f"{what} shares its memory with another tensor; let one Parameter stand for both")
        any_offloaded = is_offloaded or (any_offloaded and begin < last_end)
        last_end = max(last_end, end)
