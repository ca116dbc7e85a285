"""Update parameters, gradients and states that lie on disk, a window at a time.

Before:                                  After:
    optimizer.step()                         fill window 0
      reads and writes all of it             for each window:
                                                 fill the next one        # two threads, from the disk
                                                 optimizer.step() on this one
                                                 drain it                 # two threads, to the disk

There are two windows: while one is computed, the other is drained and filled anew. So the disk is busy throughout where
it is slower than the processor, and the processor where it is slower. What is in memory is used where it is.

Behind a GPU some parameters may be stepped on the host (`host_step.py`). Theirs are the last windows: the device has
been given the others by then, and goes on with them meanwhile.

An update that the disk interrupts knows which windows are done, and goes on from there.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, optim

from ..storage.async_copy import Copy, CopyFunction, CopyLog, finish_copies
from ..storage.io_threads import read, write
from ..storage.mapped_storage import BufferLocation
from ..storage.pinned_storage import PinnedBufferAllocator
from ..storage.transfer import PendingCopy, offload_slices, reload_slices, wait_all
from ..system.signals import Interrupts
from ..tensors.versions import version_of
from .host_step import HostStep, place_states_on_host, split_by_device
from .optimizer_clone import ClonedOptimizer
from .update_operands import (
    GRADIENT,
    PARAMETER,
    ParameterPredicate,
    allocate_new_states,
    no_parameters,
    parameter_updates,
)
from .window_plan import Window, aligned, plan_windows
from .window_views import WindowView, WriteBack, commit, in_buffer, range_of, state_of, view

__all__ = ["WindowedUpdate", "view"]


@dataclass(frozen=True)
class FilledWindow:
    """A window that is being filled."""

    views: list[WindowView]
    copies: list[PendingCopy]


@dataclass(frozen=True)
class DrainedWindow:
    """A window that was computed and is being drained."""

    views: list[WindowView]
    writes: list[WriteBack]
    copies: list[PendingCopy]


class WindowedUpdate:
    """One update of an optimizer. `run` may be called again when it has failed."""

    def __init__(
        self, optimizer: optim.Optimizer, nbytes: int, offloaded: ParameterPredicate, location: BufferLocation,
        loss: Any = None, on_host: ParameterPredicate = no_parameters, awaited: Sequence[Tensor] = (),
    ) -> None:  # fmt: skip
        """`on_host`: the parameters that are stepped on the host, if that has their states. `awaited`: all parameters
        of the optimizer, in this order, if their gradients come one by one.

        Raises:
            SpillError: the disk does not take states that have to go there. Nothing has changed.
            UpdateError: two parameters lie on one place.
            ValueError: the windows are too small for a chunk of some parameter.
        """
        self.optimizer, self.loss = optimizer, loss
        self.clone = ClonedOptimizer(optimizer)
        order = {parameter: i for i, parameter in enumerate(awaited)}
        found = parameter_updates(optimizer, self.clone, offloaded, location, bool(awaited))
        found.sort(key=lambda update: order.get(update.parameter, 0))
        here, there = split_by_device(found, self.clone, on_host, location)
        self.updates = [*here, *there]
        own = plan_windows([update.row for update in here], nbytes, separate=bool(awaited))
        self.first_host_window = len(own)  # of the windows from this one on, which are the host's
        self.windows = own + plan_windows([update.row for update in there], nbytes, len(here))
        for window in self.windows:
            for chunk in window:
                self.updates[chunk.row].chunks_left += 1
        allocate_new_states(self.updates, offloaded, location)
        for update in there:
            place_states_on_host(update)
        device = here[0].parameter.device if here else None
        self.buffers = [torch.empty(self._buffer_nbytes(own), dtype=torch.uint8, device=device) for _ in own[:2]]
        most = self._buffer_nbytes(self.windows[self.first_host_window :])
        self.host_step = (
            HostStep(optimizer, location, most) if there and isinstance(location, PinnedBufferAllocator) else None
        )
        self.computed = self.finished = 0  # windows
        self.waited_s = 0.0  # seconds for the far tier
        self.copies: CopyLog = {write: [], read: []}
        self.filled: dict[int, FilledWindow] = {}
        self.drained: dict[int, DrainedWindow] = {}
        self.fingerprints = self._fingerprints()

    def _buffer_nbytes(self, windows: Sequence[Window]) -> int:
        """The room that one of these takes."""
        rows = [update.row for update in self.updates]
        return max(
            (sum(rows[chunk.row].buffer_nbytes(chunk.count) for chunk in window) for window in windows), default=0
        )

    @property
    def is_done(self) -> bool:
        return self.finished == len(self.windows)

    @property
    def is_started(self) -> bool:
        """Whether anything may have changed."""
        return self.computed > 0

    def run(self) -> None:
        """Update all windows that are not done.

        Raises:
            SpillError: the disk failed. What is done is known, and the next call goes on.
        """
        with Interrupts() as interrupts:
            try:
                self._restart()
                if self.host_step:
                    self.host_step.begin()
                while not self.is_done:
                    self._advance()
                    interrupts.check()
            except BaseException:
                self._finish_copies()
                raise
            finally:
                self.fingerprints = self._fingerprints()

    def changed(self) -> str | None:
        """What somebody has changed since: "state" (a parameter or a state), "gradient", or None."""
        states, gradients = self._fingerprints()
        return "state" if states != self.fingerprints[0] else "gradient" if gradients != self.fingerprints[1] else None

    def _advance(self) -> None:
        """Compute one window, or finish one if all are computed."""
        now = self.computed
        if now == len(self.windows):
            self._finish(self.finished)
            return
        self._read_ahead()
        if now - self.finished == 2:
            self._finish(self.finished)
        self._compute(now)

    def _on_host(self, at: int) -> HostStep | None:
        """What steps on a window, if that is the host."""
        return self.host_step if at >= self.first_host_window else None

    def _read_ahead(self) -> None:
        """Begin to fill the next two windows, each as soon as what was there has been written."""
        for at in range(self.computed, min(self.computed + 2, len(self.windows))):
            if at not in self.filled:
                self.filled[at] = self._fill(at)

    def _fill(self, at: int) -> FilledWindow:
        host = self._on_host(at)
        if host:
            host.wait()
        before = self.drained.get(at - 2)
        after = [part for copy in before.copies for part in copy.chunks] if before else []
        slab, begin = (host or self).buffers[at % 2], 0
        filled = FilledWindow([], [])
        for chunk in self.windows[at]:
            update, tensors = self.updates[chunk.row], {}
            for name, operand in update.operands.items():
                if operand.needs_buffer(chunk.whole):
                    room = aligned(chunk.count * operand.tensor.dtype.itemsize)
                    tensors[name] = in_buffer(slab[begin : begin + room], operand, chunk)
                    begin += room
                else:
                    tensors[name] = view(operand, chunk)
                if place := operand.copied_slice(chunk.whole):
                    copy = reload_slices(range_of(place, chunk, operand.tensor.dtype), tensors[name], after)
                    filled.copies.append(self._logged(read, copy))
            filled.views.append(WindowView(update, chunk, tensors, state_of(update, chunk, tensors)))
        return filled

    def _compute(self, at: int) -> None:
        filled = self.filled[at]
        self._wait(filled.copies)
        given = []
        for one in filled.views:
            one.gather()
            chunk = one.tensors[PARAMETER]
            chunk.grad = one.tensors[GRADIENT]
            given.append((one.update.group, chunk, one.state))
        versions = [version_of(one.tensors[GRADIENT]) for one in filled.views]
        states = (self._on_host(at) or self.clone).step(given)
        del self.filled[at]
        self.computed += 1
        writes: list[WriteBack] = []
        for one, state, version in zip(filled.views, states, versions, strict=True):
            # Nesterov's momentum with foreach=True works in the gradient; fused updates unscale it, and do not say so.
            written = version_of(one.tensors[GRADIENT]) > version or bool(self.clone.scaling)
            writes += one.write_back(written) + one.store_new_states(state or {})
            one.state.clear()  # its numbers are the update's now
        self.drained[at] = DrainedWindow(
            filled.views, writes, [self._logged(write, offload_slices(*each)) for each in writes]
        )

    def _logged(self, move: CopyFunction, copy: PendingCopy) -> PendingCopy:
        if isinstance(copy, Copy):  # what a stream copies keeps no times
            self.copies[move] += copy.chunks
        return copy

    def _finish(self, at: int) -> None:
        drained = self.drained[at]
        self._wait(drained.copies)
        del self.drained[at]
        self.finished += 1
        for one in drained.views:
            one.update.chunks_left -= 1
            if not one.update.chunks_left:
                commit(self.optimizer, one.update)
                one.update.scalars.clear()  # they would stay as long as the update

    def _wait(self, copies: Sequence[PendingCopy]) -> None:
        begin = time.perf_counter()
        wait_all(copies)
        self.waited_s += time.perf_counter() - begin

    def _restart(self) -> None:
        """Read again what was not computed, and write again what could not be written."""
        self._finish_copies()
        self.filled.clear()
        for drained in self.drained.values():
            for i, copy in enumerate(drained.copies):
                if any(part.error for part in copy.chunks):
                    drained.copies[i] = offload_slices(*drained.writes[i])

    def _finish_copies(self) -> None:
        """Wait until no copy is under way."""
        windows: list[FilledWindow | DrainedWindow] = [*self.filled.values(), *self.drained.values()]
        for window in windows:
            finish_copies(*window.copies)

    def _fingerprints(self) -> tuple[list[object], list[object]]:
        """What tells whether a parameter or a state, or a gradient, is another or was written."""
        found = [update.parameter for update in self.updates]
        states = [value for parameter in found for value in self.optimizer.state.get(parameter, {}).values()]
        return [_fingerprint(value) for value in (*found, *states)], [
            _fingerprint(parameter.grad) for parameter in found
        ]


def _fingerprint(value: Any) -> object:
    if not isinstance(value, Tensor):
        return value
    return id(value), value.data_ptr(), version_of(value)
