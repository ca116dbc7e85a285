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
    Layouts,
    TensorSpec,
    buffer_slice_of,
    tensor_spec_of,
)
from ..storage.places import Places, map_tensors
from ..storage.transfer import offload_tensors
from ..storage.weight_file import forget_weight
from ..tensors.aliasing import address_range
from ..tensors.layout import is_dense
from ..tensors.parameter_groups import parameter_groups
from ..tensors.state_leaves import SMALLEST, StateLeaf, is_movable, state_leaves
from .elementwise import is_exact
from .optimizer_profiler import OptimizerProfiler
from .parameter_kind import ParameterKind
from .window_plan import WindowChunk, WindowRow

ParameterPredicate = Callable[[Tensor], bool]

LayoutsOf = Callable[[Tensor], Layouts]  # of the leaves of a state, as a first step creates them

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

    @property
    def is_moved(self) -> bool:
        """True if a step has another tensor than the user."""
        return self.slice is not None or self.owner is not None

    def copied_slice(self, whole: bool) -> BufferSlice | None:
        """Return the slice if chunks are copied as contiguous bytes; else they are gathered row by row."""
        return self.slice if whole or self.flat is not None else None

    def needs_buffer(self, whole: bool) -> bool:
        """Return True if chunks need bytes in the window."""
        return self.slice is not None or (self.flat is None and not whole)

    def chunk_nbytes(self, chunk: WindowChunk) -> int:
        """Return the bytes of a chunk."""
        return self.tensor.nbytes if chunk.whole else chunk.count * self.tensor.itemsize


@dataclass
class ParameterUpdate:
    """The update of one parameter."""

    parameter: Tensor
    group: int
    state: dict[str, Any]
    layouts: Layouts  # of the leaves of its state that are cut as the parameter is
    whole: bool = False  # which then is not cut
    operands: dict[str, UpdateOperand] = field(default_factory=dict)
    new_states: dict[str, UpdateOperand] = field(default_factory=dict)
    scalar_devices: Mapping[str, torch.device] = field(default_factory=dict)  # of those to move there after it
    chunks_left: int = 0
    on_host: bool = False

    @property
    def missing_states(self) -> dict[str, TensorSpec]:
        """The states that the update will create, as far as they may be offloaded."""
        return {name: spec for name, spec in self.layouts.items() if name not in self.operands}

    @property
    def existing_states(self) -> list[StateLeaf]:
        """The states that exist, as far as they may be offloaded."""
        leaves = state_leaves(self.state)
        if self.whole:
            return list(filter(is_movable, leaves))
        shape = self.parameter.shape
        return [leaf for leaf in leaves if leaf.name in self.layouts and leaf.tensor.shape == shape]

    def set_gradient(self, gradient: Tensor | None) -> None:
        """Use this gradient; None: one will come, with any strides."""
        if gradient is None:
            gradient = torch.empty((), dtype=self.parameter.dtype, device="meta").expand(self.parameter.shape)
        self.operands[GRADIENT] = UpdateOperand(
            gradient, buffer_slice_of(gradient), order_of(self.parameter), written=False
        )

    @property
    def row(self) -> WindowRow:
        whole, missing = self.whole, self.missing_states.values()
        buffered, resident = (
            tuple(
                operand.tensor.nbytes if whole else operand.tensor.itemsize
                for operand in self.operands.values()
                if operand.needs_buffer(whole) is side
            )
            for side in (True, False)
        )
        if whole:
            return WindowRow(1, buffered, resident, tuple(spec.nbytes for spec in missing), exact=False)
        created = tuple(spec.dtype.itemsize for spec in missing)
        return WindowRow(self.parameter.numel(), buffered, resident, created, is_exact(self.parameter, self.on_host))


def parameter_updates(
    optimizer: optim.Optimizer, groups: Sequence[Mapping[str, Any]], offloaded: ParameterPredicate,
    location: BufferLocation | Places, whole: bool = False, gradient_order: Sequence[Tensor] = (),
) -> list[ParameterUpdate]:  # fmt: skip
    """Return an update for each parameter of these groups with a gradient.

    If gradients come one by one, `gradient_order` has all parameters, in that order. Existing states of `offloaded`
    parameters are offloaded first.

    Args:
        whole: no parameter is cut.

    Raises:
        SpillError: the disk does not take them.
        UpdateError: two tensors share memory.
    """
    order, layouts = {parameter: i for i, parameter in enumerate(gradient_order)}, state_layouts(optimizer)
    updates = [
        ParameterUpdate(
            parameter, i, optimizer.state.get(parameter, {}), chunked_layouts(parameter, layouts(parameter), whole),
            whole,
        )
        for i, group in enumerate(groups)
        for parameter in group["params"]
        if order or parameter.grad is not None
    ]  # fmt: skip
    updates.sort(key=lambda update: order.get(update.parameter, 0))
    return _completed(updates, offloaded, location, is_early=bool(order))


def state_layouts(optimizer: optim.Optimizer) -> LayoutsOf:
    """Return what tells the leaves of the state of each parameter of an optimizer."""
    profiler, groups = OptimizerProfiler(optimizer), parameter_groups(optimizer)
    return lambda parameter: profiler.layouts(ParameterKind.of(groups[parameter], parameter))


def chunked_layouts(parameter: Tensor, layouts: Layouts, whole: bool) -> Layouts:
    """Return those leaves of a state that are cut as a parameter is, or with `whole` those that may be offloaded."""
    own = {
        name: _spec_beside(parameter, spec.dtype) if spec.shape == parameter.shape else spec
        for name, spec in layouts.items()
    }
    return {
        name: spec
        for name, spec in own.items()
        if (spec.nbytes >= SMALLEST if whole else spec.shape == parameter.shape)
    }


def allocate_new_states(
    updates: Sequence[ParameterUpdate], offloaded: ParameterPredicate, location: BufferLocation | Places
) -> None:
    """Allocate the states that updates will create.

    Raises:
        SpillError: the disk has no space for them.
    """
    to_tier = []
    for update in updates:
        for key, spec in update.missing_states.items():
            if offloaded(update.parameter) and spec.nbytes:
                to_tier.append((update, key, spec))
            elif update.chunks_left > 1:  # else the optimizer's step creates it whole
                device = update.parameter.device
                update.new_states[key] = new_operand(
                    torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype, device=device)
                )
    if to_tier:
        owners = [update.parameter for update, *_ in to_tier]
        mapped = map_tensors([spec for *_, spec in to_tier], location, owners)
        for (update, key, _), (tensor, slice) in zip(to_tier, mapped, strict=True):
            update.new_states[key] = new_operand(tensor, slice)


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


def _completed(
    updates: list[ParameterUpdate],
    offloaded: ParameterPredicate,
    location: BufferLocation | Places,
    is_early: bool = False,
) -> list[ParameterUpdate]:
    """Offload states that are in memory, as they are after `load_state_dict`, and note all operands.

    With `is_early` no gradient is there yet.
    """
    leaves = {update.parameter: update.existing_states for update in updates}
    resident = [
        (leaf, update.parameter)
        for update in updates
        for leaf in leaves[update.parameter]
        if offloaded(update.parameter) and leaf.tensor.numel() and is_dense(leaf.tensor)
        and buffer_slice_of(leaf.tensor) is None
    ]  # fmt: skip
    mapped = offload_tensors([leaf.tensor for leaf, _ in resident], location, [owner for _, owner in resident])
    for (leaf, _), tensor in zip(resident, mapped, strict=True):
        leaf.put(tensor)
    for update in updates:
        update.operands = _operands(update, update.existing_states if resident else leaves[update.parameter])
        update.set_gradient(None if is_early else update.parameter.grad)
    _refuse_shared(updates)
    return updates


def _operands(update: ParameterUpdate, leaves: Sequence[StateLeaf]) -> dict[str, UpdateOperand]:
    """The parameter and its states; a weight that stays in a file is updated in memory."""
    if (place := buffer_slice_of(update.parameter)) is not None:
        forget_weight(update.parameter, place)
    tensors = {PARAMETER: update.parameter, **{leaf.name: leaf.tensor for leaf in leaves}}
    order, whole = order_of(update.parameter), update.whole
    return {
        name: UpdateOperand(tensor, buffer_slice_of(tensor), order_of(tensor) if whole else order, written=True)
        for name, tensor in tensors.items()
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
