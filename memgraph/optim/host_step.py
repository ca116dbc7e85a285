"""Update on the host behind a GPU, on pinned memory.

    w, dw, s in pinned memory        ->   AdamW.step on host tensors at the same addresses
    w and dw on the device, s not    ->   both are copied to a pinned window; AdamW.step; w is copied back

The optimizer's own step runs, by its fused CPU kernel where it has one and the options do not choose another. A GPU's
kernels round differently, so the last bits differ from an update on the device.

    AdamW, windows of 16 MB of float32   ->   8900 bytes of states per microsecond, measured once and cached
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, optim

from ..storage.mapped_storage import BufferLocation, BufferSlice, CopySource
from ..storage.pinned_storage import AfterEvent, PinnedBufferAllocator, StreamCopy
from ..storage.pinned_tier import extra_streams, record_event
from ..system.device import CPU
from ..tensors.layout import view_bytes_as
from ..tensors.parameter_groups import parameter_groups
from .elementwise import EXACT_DTYPES
from .optimizer_profiler import UNLIMITED, OptimizerProfiler
from .parameter_kind import ParameterKind
from .step_on import SCALING, Group, StepOutcome, step_window
from .trained_parameters import Owner
from .trial_copy import copy_with
from .update_operands import ParameterPredicate, ParameterUpdate, UpdateOperand
from .window_views import WindowView, WriteBack


class HostStep:
    """The optimizer's step on host tensors, and two pinned windows for what is on the device."""

    def __init__(
        self, optimizer: optim.Optimizer, groups: Sequence[Group], host: PinnedBufferAllocator, nbytes: int
    ) -> None:
        """
        Raises:
            PinnedError: the host has no memory for windows of so many bytes.
        """
        self.host, self.optimizer, self.groups = host, optimizer, host_groups(optimizer, groups)
        self.buffers = [torch.empty(0, dtype=torch.uint8)] * 2
        self.pending = host.cuda.Event()
        if nbytes:
            block = host.pool.acquire(2 * nbytes, host.device)
            weakref.finalize(self, host.pool.release, block).atexit = False
            for event in block.events:  # of the copies of its previous user
                event.synchronize()
            self.buffers = list(block.bytes[: 2 * nbytes].split(nbytes))

    def begin(self) -> None:
        """Record the device's present work: offloaded state is up to date, and may be written, when that is done."""
        self.pending.record(self.host.cuda.current_stream(self.host.device))

    def wait(self) -> None:
        """Wait until the device has done the work that `begin` recorded."""
        self.pending.synchronize()

    def step(self, views: Sequence[WindowView], outcome: StepOutcome) -> list[WriteBack]:
        """Step on the host tensors of a window; return what has to be copied to the tier beside what was filled.

        Those without a state are updated separately: SGD's fused kernel assumes that all are like the first.
        """
        state = self.optimizer.state
        rows = [[each for each in views if bool(state.get(each.update.parameter)) is known] for known in (True, False)]
        scaling = {name: vars(self.optimizer)[name] for name in SCALING if name in vars(self.optimizer)}
        vars(self.optimizer).update({name: _to_host(value) for name, value in scaling.items()})
        # Before torch 2.13 an optimizer makes its numbers on the default device.
        own_device = torch.get_default_device().type != "cpu"
        try:
            with CPU if own_device else nullcontext():
                return [
                    write for row in rows if row for write in step_window(self.optimizer, self.groups, row, outcome)
                ]
        finally:
            vars(self.optimizer).update(scaling)


def reserve_windows(host: PinnedBufferAllocator, nbytes: int, owner: object) -> None:
    """Reserve pinned memory for two windows as long as `owner` exists.

    Raises:
        PinnedError: it would exceed what is allowed.
    """
    host.pool.reserve(2 * nbytes, host.device)
    weakref.finalize(owner, host.pool.unreserve, 2 * nbytes, host.device).atexit = False


def split_by_device(
    updates: Sequence[ParameterUpdate],
    optimizer: optim.Optimizer,
    on_host: ParameterPredicate,
    location: BufferLocation,
) -> tuple[list[ParameterUpdate], list[ParameterUpdate]]:
    """Divide updates into those on the device and those on the host, whose operands become host tensors."""
    device_updates, host_updates = list[ParameterUpdate](), list[ParameterUpdate]()
    for update in updates:
        # Fused CPU kernels go through memory in order, whatever the strides, so all operands need the same order.
        same_order = all(operand.flat is not None for operand in update.operands.values())
        is_cut = not update.whole and same_order
        if is_cut and isinstance(location, PinnedBufferAllocator) and on_host(update.parameter):
            _move_to_host(update, optimizer, location)
            host_updates.append(update)
        else:
            device_updates.append(update)
    return device_updates, host_updates


def place_states_on_host(update: ParameterUpdate) -> None:
    """Let the host write new offloaded states directly."""
    for key, operand in update.new_states.items():
        if operand.slice:
            update.new_states[key] = _host_operand(operand)


def host_groups(optimizer: optim.Optimizer, groups: Sequence[Group]) -> list[Group]:
    """Return these groups with options for a step on host tensors, by the fused kernel if there is one."""
    found = []
    for group in groups:
        options = {key: value if key == "params" else _to_host(value) for key, value in group.items()}
        chosen = "fused" not in options or options["fused"] is not None or options["foreach"]
        if not chosen and all(_has_fused_kernel(optimizer, parameter) for parameter in group["params"]):
            options["fused"] = True
        found.append(options)
    return found


def host_update_rate(optimizer: optim.Optimizer, states: Mapping[Owner, int], nbytes: int) -> float:
    """Return the bytes of all `states` that the host updates per microsecond, in windows of `nbytes`.

    0.0 if there are none. A window of made-up parameters is stepped on, in memory that no cache holds.
    """
    groups, on_host = parameter_groups(optimizer), copy_with(optimizer, host_groups(optimizer, optimizer.param_groups))
    profiler, counts = OptimizerProfiler(on_host), Counter[tuple[int, torch.dtype]]()
    for parameter in (owner for owner in states if isinstance(owner, Tensor)):
        counts[groups[parameter], parameter.dtype] += parameter.numel()
    us = sum(count * _element_us(profiler, *kind, nbytes) for kind, count in counts.items())
    return sum(states.values()) / us if us else 0.0


class DeviceSource(CopySource):
    """The bytes of a tensor on the device, which are copied to and from the host's windows.

    The device does not touch them during the update, so no copy waits for its other work.
    """

    def __init__(self, host: PinnedBufferAllocator, tensor: Tensor) -> None:
        self.host = host
        begin = tensor.storage_offset() * tensor.itemsize
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        self.flat = flat.set_(tensor.untyped_storage(), begin, (tensor.nbytes,), (1,))

    def reload(self, place: BufferSlice, tensor: Tensor, after: Sequence[AfterEvent] = ()) -> HostCopy:
        to_host, _ = extra_streams(self.host.cuda, self.host.device)
        return HostCopy(self.host, to_host, tensor, self._view_like(place, tensor), after)

    def offload(self, place: BufferSlice, tensor: Tensor) -> HostCopy:
        _, to_device = extra_streams(self.host.cuda, self.host.device)
        return HostCopy(self.host, to_device, self._view_like(place, tensor), tensor)

    def _view_like(self, place: BufferSlice, tensor: Tensor) -> Tensor:
        return view_bytes_as(self.flat[place.offset : place.offset + place.nbytes], tensor)


class HostCopy(StreamCopy):
    """A copy that runs beside the device's other work, and for which the host itself waits."""

    def _start(self, stream: Any, into: Tensor, of: Tensor) -> Any:
        return record_event(self.host.cuda, stream, into, of)

    def wait(self) -> None:
        self.event.synchronize()


def _has_fused_kernel(optimizer: optim.Optimizer, parameter: Tensor) -> bool:
    """Return True if the fused kernel takes it and is deterministic: SGD's is not in low precision."""
    low = parameter.is_floating_point() and type(optimizer) is not optim.SGD
    return low or parameter.dtype in EXACT_DTYPES


def _move_to_host(update: ParameterUpdate, optimizer: optim.Optimizer, host: PinnedBufferAllocator) -> None:
    """Let an update use offloaded operands in place, and copy the others to windows."""
    for name, operand in update.operands.items():
        if operand.slice is None:
            slice = BufferSlice(0, operand.tensor.nbytes, DeviceSource(host, operand.tensor))
            update.operands[name] = replace(operand, slice=slice)
        else:
            update.operands[name] = _host_operand(operand)
    if not update.state:
        kind = ParameterKind.of(update.group, update.parameter)
        update.scalar_devices = OptimizerProfiler(optimizer).scalar_devices(kind)
    update.on_host = True


def _host_operand(operand: UpdateOperand) -> UpdateOperand:
    """An offloaded operand as a host tensor."""
    assert operand.slice is not None
    return replace(operand, tensor=operand.slice.view_like(operand.tensor), slice=None, owner=operand.tensor)


def _to_host(value: Any) -> Any:
    return value.to(CPU) if isinstance(value, Tensor) else value


def _element_us(profiler: OptimizerProfiler, group: int, dtype: torch.dtype, nbytes: int) -> float:
    """Return the microseconds of an element, where a window is stepped on."""
    count = max(1, nbytes // (2 * dtype.itemsize + profiler.element_nbytes(group, dtype)))
    return profiler.update_us(ParameterKind(group, (count,), dtype, CPU), UNLIMITED) / count
