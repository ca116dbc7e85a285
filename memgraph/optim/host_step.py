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
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, optim

from ..guards.signature import kernel_modes
from ..storage.mapped_storage import BufferLocation, BufferSlice, CopySource
from ..storage.pinned_storage import AfterEvent, PinnedBufferAllocator, StreamCopy
from ..storage.pinned_tier import extra_streams, record_event
from ..system.device import CPU
from ..system.measurement_cache import measure_once
from ..system.setting import environment_key
from ..system.timer import flush_caches, shortest_us
from ..tensors.layout import view_bytes_as
from ..tensors.parameter_groups import parameter_groups
from .elementwise import EXACT_DTYPES
from .optimizer_clone import ClonedOptimizer, StepInput, initial_state
from .optimizer_profiler import kernel_options
from .trained_parameters import Owner
from .update_operands import ParameterPredicate, ParameterUpdate, UpdateOperand

_element_times: dict[str, float] = {}  # microseconds; a cache, so that nothing is timed twice in a process


class HostStep:
    """The optimizer over host tensors, and two pinned windows for what is on the device."""

    def __init__(self, optimizer: optim.Optimizer, host: PinnedBufferAllocator, nbytes: int) -> None:
        """
        Raises:
            PinnedError: the host has no memory for windows of so many bytes.
        """
        self.host, self.clone = host, clone_on_host(optimizer)
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

    def step(self, inputs: Sequence[StepInput]) -> list[dict[str, Any] | None]:
        """Update host tensors; return the state of each.

        Those without a state are updated separately: SGD's fused kernel assumes that all are like the first.
        """
        states: dict[int, dict[str, Any] | None] = {}
        for is_new in (False, True):
            some = [i for i, (_, _, state) in enumerate(inputs) if is_new is not bool(state)]
            states.update(zip(some, self.clone.step([inputs[i] for i in some]), strict=True) if some else ())
        return [states[i] for i in range(len(inputs))]


def reserve_windows(host: PinnedBufferAllocator, nbytes: int, owner: object) -> None:
    """Reserve pinned memory for two windows as long as `owner` exists.

    Raises:
        PinnedError: it would exceed what is allowed.
    """
    host.pool.reserve(2 * nbytes, host.device)
    weakref.finalize(owner, host.pool.unreserve, 2 * nbytes, host.device).atexit = False


def split_by_device(
    updates: Sequence[ParameterUpdate], clone: ClonedOptimizer, on_host: ParameterPredicate, location: BufferLocation
) -> tuple[list[ParameterUpdate], list[ParameterUpdate]]:
    """Divide updates into those on the device and those on the host, whose operands become host tensors."""
    device_updates, host_updates = list[ParameterUpdate](), list[ParameterUpdate]()
    for update in updates:
        # Fused CPU kernels go through memory in order, whatever the strides, so all operands need the same order.
        same_order = all(operand.flat is not None for operand in update.operands.values())
        if isinstance(location, PinnedBufferAllocator) and on_host(update.parameter) and same_order:
            _move_to_host(update, clone, location)
            host_updates.append(update)
        else:
            device_updates.append(update)
    return device_updates, host_updates


def place_states_on_host(update: ParameterUpdate) -> None:
    """Let the host write new offloaded states directly."""
    for key, operand in update.new_states.items():
        if operand.slice:
            update.new_states[key] = _host_operand(operand)


def clone_on_host(optimizer: optim.Optimizer) -> ClonedOptimizer:
    """Return the optimizer's step on host tensors, by the fused kernel if it has one."""
    clone = ClonedOptimizer(optimizer)
    for options, group in zip(clone.options, optimizer.param_groups, strict=True):
        options |= {key: _to_host(value) for key, value in options.items()}
        chosen = "fused" not in options or options["fused"] is not None or options["foreach"]
        if not chosen and all(_has_fused_kernel(optimizer, parameter) for parameter in group["params"]):
            options["fused"] = True
    clone.scaling = {name: _to_host(value) for name, value in clone.scaling.items()}
    clone.device = CPU
    return clone


def host_update_rate(optimizer: optim.Optimizer, states: Mapping[Owner, int], nbytes: int) -> float:
    """Return the bytes of all `states` that the host updates per microsecond, in windows of `nbytes`.

    0.0 if there are none. A window of made-up parameters is stepped on, in memory that no cache holds.
    """
    groups = parameter_groups(optimizer)
    counts = Counter[tuple[int, torch.dtype]]()
    for parameter in (owner for owner in states if isinstance(owner, Tensor)):
        counts[groups[parameter], parameter.dtype] += parameter.numel()
    clone = clone_on_host(optimizer)
    us = sum(count * _element_us(clone, *kind, nbytes) for kind, count in counts.items())
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


def _move_to_host(update: ParameterUpdate, clone: ClonedOptimizer, host: PinnedBufferAllocator) -> None:
    """Let an update use offloaded operands in place, and copy the others to windows."""
    for name, operand in update.operands.items():
        if operand.slice is None:
            slice = BufferSlice(0, operand.tensor.nbytes, DeviceSource(host, operand.tensor))
            update.operands[name] = replace(operand, slice=slice)
        else:
            update.operands[name] = _host_operand(operand)
    if not update.state:
        update.scalar_devices = clone.scalar_devices(update.group, update.parameter.dtype)
    update.state = {key: value if key in update.operands else _to_host(value) for key, value in update.state.items()}
    update.on_host = True


def _host_operand(operand: UpdateOperand) -> UpdateOperand:
    """An offloaded operand as a host tensor."""
    assert operand.slice is not None
    return replace(operand, tensor=operand.slice.view_like(operand.tensor), slice=None, owner=operand.tensor)


def _to_host(value: Any) -> Any:
    return value.to(CPU) if isinstance(value, Tensor) else value


def _element_us(clone: ClonedOptimizer, group: int, dtype: torch.dtype, nbytes: int) -> float:
    kind = f"{type(clone.optimizer)} {kernel_options(clone.options[group])} {dtype}"
    key = f"host step {kind} {nbytes} {kernel_modes()} {environment_key(CPU)}"
    return measure_once(_element_times, key, lambda: _measure_us(clone, group, dtype, nbytes), float, float)


def _measure_us(clone: ClonedOptimizer, group: int, dtype: torch.dtype, nbytes: int) -> float:
    states = sum(state.itemsize for state in clone.state_dtypes(group, dtype).values() if state)
    count = max(1, nbytes // (2 * dtype.itemsize + states))
    sample = torch.zeros(count, dtype=dtype)
    sample.grad = torch.zeros_like(sample)
    (state,) = clone.step([(group, sample, initial_state(clone.optimizer, clone.options[group], sample))])
    us = shortest_us(partial(clone.step, [(group, sample, state or {})]), CPU, flush_caches(CPU))
    return us / count
