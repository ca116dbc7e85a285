"""Step an optimizer on the host, on the bytes of its homes there.  Not yet run on a GPU.

    w, dw, s in pinned memory        ->   AdamW.step on tensors of the host at the same addresses
    w and dw on the device, s not    ->   they come into a window of pinned memory; AdamW.step; w goes back

The optimizer's own step runs, by its fused kernel for processors where it has one and nothing else was asked for.  A
GPU's kernels round otherwise, so this gives other last bits than they do.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, optim

from ..storage.mapped_storage import BufferLocation, BufferSlice, Source
from ..storage.pinned_storage import AfterEvent, PinnedBufferAllocator, StreamCopy
from ..storage.pinned_tier import extra_streams, record_event
from ..system.device import CPU
from ..tensors.layout import view_bytes_as
from .elementwise import EXACT
from .optimizer_clone import ClonedOptimizer, Given
from .update_operands import ParameterUpdate, UpdateOperand, Whose


class HostStep:
    """What steps on the host: the optimizer as one of the host's tensors, and two windows for what is on the device."""

    def __init__(self, optimizer: optim.Optimizer, host: PinnedBufferAllocator, nbytes: int) -> None:
        """
        Raises:
            PinnedError: the host does not give windows of so many bytes.
        """
        self.host, self.stepper = host, stepper_on_host(optimizer)
        self.slabs = [torch.empty(0, dtype=torch.uint8)] * 2
        self.due = host.cuda.Event()
        if nbytes:
            slab = host.slabs.lend(2 * nbytes, host.device)
            weakref.finalize(self, host.slabs.take_back, slab).atexit = False
            for event in slab.after:  # of the copies of who had it before
                event.synchronize()
            self.slabs = list(slab.bytes[: 2 * nbytes].split(nbytes))

    def begin(self) -> None:
        """Note what the device has to do now: once that is done, homes hold what they should, and may be written."""
        self.due.record(self.host.cuda.current_stream(self.host.device))

    def wait(self) -> None:
        """Until the device has done what `begin` has noted."""
        self.due.synchronize()

    def step(self, pieces: Sequence[Given]) -> list[dict[str, Any] | None]:
        """Update tensors of the host; returns the state of each.

        Those that have none yet are updated apart: SGD's fused kernel takes all for what the first is.
        """
        found: dict[int, dict[str, Any] | None] = {}
        for new in (False, True):
            some = [i for i, (_, _, state) in enumerate(pieces) if new is not bool(state)]
            found.update(zip(some, self.stepper.step([pieces[i] for i in some]), strict=True) if some else ())
        return [found[i] for i in range(len(pieces))]


def reserve(host: PinnedBufferAllocator, nbytes: int, owner: object) -> None:
    """Have pinned memory for two windows at hand as long as `owner` lives.

    Raises:
        PinnedError: there would be more of it than is allowed.
    """
    host.slabs.reserve(2 * nbytes, host.device)
    weakref.finalize(owner, host.slabs.forget, 2 * nbytes, host.device).atexit = False


def split_parts(
    subjects: Sequence[ParameterUpdate], stepper: ClonedOptimizer, hosted: Whose, where: BufferLocation
) -> tuple[list[ParameterUpdate], list[ParameterUpdate]]:
    """What is stepped on the device, and what on the host, which sees it as its own from now on."""
    here, there = list[ParameterUpdate](), list[ParameterUpdate]()
    for subject in subjects:
        if isinstance(where, PinnedBufferAllocator) and hosted(subject.parameter) and _is_alike(subject):
            _see_from_host(subject, stepper, where)
            subject.hosted = True
            there.append(subject)
        else:
            here.append(subject)
    return here, there


def states_on_host(subject: ParameterUpdate) -> None:
    """Have new states written where their homes are."""
    subject.fresh = {key: _seen(strand) if strand.place else strand for key, strand in subject.fresh.items()}


def stepper_on_host(optimizer: optim.Optimizer) -> ClonedOptimizer:
    """The optimizer's step on tensors of the host, by the fused kernel if it has one."""
    stepper = ClonedOptimizer(optimizer)
    for options, group in zip(stepper.options, optimizer.param_groups, strict=True):
        options |= {key: _there(value) for key, value in options.items()}
        chosen = "fused" not in options or options["fused"] is not None or options["foreach"]
        if not chosen and all(_has_kernel(optimizer, parameter) for parameter in group["params"]):
            options["fused"] = True
    stepper.scaling = {name: _there(value) for name, value in stepper.scaling.items()}
    stepper.device = CPU
    return stepper


def _has_kernel(optimizer: optim.Optimizer, parameter: Tensor) -> bool:
    """Whether the fused kernel takes it, and gives the same twice, which SGD's does not in low precision."""
    low = parameter.is_floating_point() and type(optimizer) is not optim.SGD
    return low or parameter.dtype in EXACT


class DeviceSource(Source):
    """The bytes of a tensor on the device, to and from which the host's windows are copied.

    Whatever the device has to do from the beginning of the update on leaves them alone, so no copy waits for that.
    """

    def __init__(self, host: PinnedBufferAllocator, tensor: Tensor) -> None:
        self.host = host
        begin = tensor.storage_offset() * tensor.itemsize
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        self.flat = flat.set_(tensor.untyped_storage(), begin, (tensor.nbytes,), (1,))

    def fetched(self, place: BufferSlice, tensor: Tensor, after: Sequence[AfterEvent] = ()) -> HostCopy:
        return HostCopy(
            self.host, extra_streams(self.host.cuda, self.host.device)[0], tensor, self._at(place, tensor), after
        )

    def stored(self, place: BufferSlice, tensor: Tensor) -> HostCopy:
        return HostCopy(self.host, extra_streams(self.host.cuda, self.host.device)[1], self._at(place, tensor), tensor)

    def _at(self, place: BufferSlice, tensor: Tensor) -> Tensor:
        return view_bytes_as(self.flat[place.offset : place.offset + place.nbytes], tensor)


class HostCopy(StreamCopy):
    """A copy beside whatever else the device does, for which the host itself waits."""

    def _begun(self, stream: Any, into: Tensor, of: Tensor) -> Any:
        return record_event(self.host.cuda, stream, into, of)

    def wait(self) -> None:
        self.event.synchronize()


def _is_alike(subject: ParameterUpdate) -> bool:
    """Whether all of it lies in one order: fused kernels for processors go through memory, whatever the strides."""
    return all(strand.flat is not None for strand in subject.strands.values())


def _see_from_host(subject: ParameterUpdate, stepper: ClonedOptimizer, host: PinnedBufferAllocator) -> None:
    """Homes are where they are, and what is on the device has to be moved."""
    for name, strand in subject.strands.items():
        lent = BufferSlice(0, strand.tensor.nbytes, DeviceSource(host, strand.tensor)) if strand.place is None else None
        subject.strands[name] = replace(strand, place=lent) if lent else _seen(strand)
    if not subject.state:
        subject.numbers = stepper.numbers(subject.group, subject.parameter.dtype)
    subject.state = {key: value if key in subject.strands else _there(value) for key, value in subject.state.items()}


def _seen(strand: UpdateOperand) -> UpdateOperand:
    """A strand in a home, as the host sees it."""
    assert strand.place is not None
    return replace(strand, tensor=strand.place.like(strand.tensor), place=None, owner=strand.tensor)


def _there(value: Any) -> Any:
    return value.to(CPU) if isinstance(value, Tensor) else value
