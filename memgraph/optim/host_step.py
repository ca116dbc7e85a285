"""Step an optimizer on the host, on the bytes of its homes there.  Not yet run on a GPU.

    w, dw, s in pinned memory        ->   AdamW.step on tensors of the host at the same addresses
    w and dw on the device, s not    ->   they come into a window of pinned memory; AdamW.step; w goes back

The optimizer's own step runs, by its fused kernel for processors where it has one and nothing else was asked for.  A
GPU's kernels round otherwise, so this gives other last bits than they do.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
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
from ..tensors.layout import shaped
from .elementwise import EXACT_DTYPES
from .optimizer_clone import ClonedOptimizer, StepInput, initial_state
from .optimizer_profiler import kernel_options
from .state_parts import StatePart
from .update_operands import ParameterPredicate, ParameterUpdate, UpdateOperand


class HostStep:
    """What steps on the host: the optimizer as one of the host's tensors, and two windows for what is on the device."""

    def __init__(self, optimizer: optim.Optimizer, host: PinnedBufferAllocator, nbytes: int) -> None:
        """
        Raises:
            PinnedError: the host does not give windows of so many bytes.
        """
        self.host, self.clone = host, clone_on_host(optimizer)
        self.buffers = [torch.empty(0, dtype=torch.uint8)] * 2
        self.due = host.cuda.Event()
        if nbytes:
            slab = host.pool.acquire(2 * nbytes, host.device)
            weakref.finalize(self, host.pool.release, slab).atexit = False
            for event in slab.events:  # of the copies of who had it before
                event.synchronize()
            self.buffers = list(slab.bytes[: 2 * nbytes].split(nbytes))

    def begin(self) -> None:
        """Note what the device has to do now: once that is done, homes hold what they should, and may be written."""
        self.due.record(self.host.cuda.current_stream(self.host.device))

    def wait(self) -> None:
        """Until the device has done what `begin` has noted."""
        self.due.synchronize()

    def step(self, chunks: Sequence[StepInput]) -> list[dict[str, Any] | None]:
        """Update tensors of the host; returns the state of each.

        Those that have none yet are updated apart: SGD's fused kernel takes all for what the first is.
        """
        found: dict[int, dict[str, Any] | None] = {}
        for new in (False, True):
            some = [i for i, (_, _, state) in enumerate(chunks) if new is not bool(state)]
            found.update(zip(some, self.clone.step([chunks[i] for i in some]), strict=True) if some else ())
        return [found[i] for i in range(len(chunks))]


def reserve_windows(host: PinnedBufferAllocator, nbytes: int, owner: object) -> None:
    """Have pinned memory for two windows at hand as long as `owner` lives.

    Raises:
        PinnedError: there would be more of it than is allowed.
    """
    host.pool.reserve(2 * nbytes, host.device)
    weakref.finalize(owner, host.pool.unreserve, 2 * nbytes, host.device).atexit = False


def split_by_device(
    updates: Sequence[ParameterUpdate], clone: ClonedOptimizer, on_host: ParameterPredicate, location: BufferLocation
) -> tuple[list[ParameterUpdate], list[ParameterUpdate]]:
    """What is stepped on the device, and what on the host, which sees it as its own from now on."""
    here, there = list[ParameterUpdate](), list[ParameterUpdate]()
    for update in updates:
        if isinstance(location, PinnedBufferAllocator) and on_host(update.parameter) and _is_alike(update):
            _see_from_host(update, clone, location)
            update.on_host = True
            there.append(update)
        else:
            here.append(update)
    return here, there


def place_states_on_host(update: ParameterUpdate) -> None:
    """Have new states written where their homes are."""
    update.new_states = {
        key: _seen(operand) if operand.slice else operand for key, operand in update.new_states.items()
    }


def clone_on_host(optimizer: optim.Optimizer) -> ClonedOptimizer:
    """The optimizer's step on tensors of the host, by the fused kernel if it has one."""
    clone = ClonedOptimizer(optimizer)
    for options, group in zip(clone.options, optimizer.param_groups, strict=True):
        options |= {key: _there(value) for key, value in options.items()}
        chosen = "fused" not in options or options["fused"] is not None or options["foreach"]
        if not chosen and all(_has_kernel(optimizer, parameter) for parameter in group["params"]):
            options["fused"] = True
    clone.scaling = {name: _there(value) for name, value in clone.scaling.items()}
    clone.device = CPU
    return clone


def _has_kernel(optimizer: optim.Optimizer, parameter: Tensor) -> bool:
    """Whether the fused kernel takes it, and gives the same twice, which SGD's does not in low precision."""
    low = parameter.is_floating_point() and type(optimizer) is not optim.SGD
    return low or parameter.dtype in EXACT_DTYPES


class DeviceSource(CopySource):
    """The bytes of a tensor on the device, to and from which the host's windows are copied.

    Whatever the device has to do from the beginning of the update on leaves them alone, so no copy waits for that.
    """

    def __init__(self, host: PinnedBufferAllocator, tensor: Tensor) -> None:
        self.host = host
        begin = tensor.storage_offset() * tensor.itemsize
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        self.flat = flat.set_(tensor.untyped_storage(), begin, (tensor.nbytes,), (1,))

    def reload(self, place: BufferSlice, tensor: Tensor, after: Sequence[AfterEvent] = ()) -> HostCopy:
        return HostCopy(
            self.host, extra_streams(self.host.cuda, self.host.device)[0], tensor, self._at(place, tensor), after
        )

    def offload(self, place: BufferSlice, tensor: Tensor) -> HostCopy:
        return HostCopy(self.host, extra_streams(self.host.cuda, self.host.device)[1], self._at(place, tensor), tensor)

    def _at(self, place: BufferSlice, tensor: Tensor) -> Tensor:
        return shaped(self.flat[place.offset : place.offset + place.nbytes], tensor)


class HostCopy(StreamCopy):
    """A copy beside whatever else the device does, for which the host itself waits."""

    def _start(self, stream: Any, into: Tensor, of: Tensor) -> Any:
        return record_event(self.host.cuda, stream, into, of)

    def wait(self) -> None:
        self.event.synchronize()


def _is_alike(update: ParameterUpdate) -> bool:
    """Whether all of it lies in one order: fused kernels for processors go through memory, whatever the strides."""
    return all(operand.flat is not None for operand in update.operands.values())


def _see_from_host(update: ParameterUpdate, clone: ClonedOptimizer, host: PinnedBufferAllocator) -> None:
    """Homes are where they are, and what is on the device has to be moved."""
    for name, operand in update.operands.items():
        lent = (
            BufferSlice(0, operand.tensor.nbytes, DeviceSource(host, operand.tensor)) if operand.slice is None else None
        )
        update.operands[name] = replace(operand, slice=lent) if lent else _seen(operand)
    if not update.state:
        update.scalar_devices = clone.scalar_devices(update.group, update.parameter.dtype)
    update.state = {key: value if key in update.operands else _there(value) for key, value in update.state.items()}


def _seen(operand: UpdateOperand) -> UpdateOperand:
    """A operand in a home, as the host sees it."""
    assert operand.slice is not None
    return replace(operand, tensor=operand.slice.view_like(operand.tensor), slice=None, owner=operand.tensor)


def _there(value: Any) -> Any:
    return value.to(CPU) if isinstance(value, Tensor) else value


_element_times: dict[str, float] = {}  # microseconds for an element


def host_update_rate(optimizer: optim.Optimizer, parts: Sequence[StatePart], nbytes: int) -> float:
    """Bytes of the states of all `parts` that the host steps per microsecond, in windows of `nbytes`; 0.0 for none."""
    groups = {parameter: i for i, group in enumerate(optimizer.param_groups) for parameter in group["params"]}
    counts = Counter[tuple[int, torch.dtype]]()
    for parameter in (parameter for part in parts for parameter in part.parameters):
        counts[groups[parameter], parameter.dtype] += parameter.numel()
    clone = clone_on_host(optimizer)
    us = sum(count * _element_us(clone, *kind, nbytes) for kind, count in counts.items())
    return sum(part.nbytes for part in parts) / us if us else 0.0


def _element_us(clone: ClonedOptimizer, group: int, dtype: torch.dtype, nbytes: int) -> float:
    kind = f"{type(clone.optimizer)} {kernel_options(clone.options[group])} {dtype}"
    key = f"host step {kind} {nbytes} {kernel_modes()} {environment_key(CPU)}"
    return measure_once(_element_times, key, lambda: _measure(clone, group, dtype, nbytes), float, float)


def _measure(clone: ClonedOptimizer, group: int, dtype: torch.dtype, nbytes: int) -> float:
    states = sum(state.itemsize for state in clone.state_dtypes(group, dtype).values() if state)
    count = max(1, nbytes // (2 * dtype.itemsize + states))
    chunk = torch.zeros(count, dtype=dtype)
    chunk.grad = torch.zeros_like(chunk)
    (state,) = clone.step([(group, chunk, initial_state(clone.optimizer, clone.options[group], chunk))])
    us = shortest_us(partial(clone.step, [(group, chunk, state or {})]), CPU, flush_caches(CPU))
    return us / count
