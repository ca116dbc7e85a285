"""Update offloaded parameters, gradients and states, a window at a time.

Before:                                  After:
    optimizer.step()                         fill window 0
      reads and writes all of it             for each window:
                                                 fill the next one        # two threads, from the disk
                                                 optimizer.step() on this one
                                                 drain it                 # two threads, to the disk

There are two buffers: while one window is computed, the other is drained and filled again. So the slower of disk and
processor is busy throughout. Tensors in memory are used where they are.

Behind a GPU some parameters may be updated on the host (`host_step.py`). Theirs are the last windows: the device has
been given the others by then, and works on them meanwhile.

An update that the disk interrupts knows which windows are done, and resumes from there.

Where gradients come one by one, as in backward, the buffers pass from one parameter to the next:

    update(v, dv)   ..., compute
    ...             drain the end of v, fill the begin of w, while backward computes
    update(w, dw)   compute, ...

Reading ahead changes nothing, and all writes have ended when `finish` returns.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, optim

from ..storage.async_copy import Copy, CopyChunk, finish_copies
from ..storage.io_threads import CopyFunction
from ..storage.mapped_storage import BufferLocation
from ..storage.pinned_storage import PinnedBufferAllocator
from ..storage.places import Places, location_of
from ..storage.transfer import PendingCopy, offload_slices, reload_slices, wait_all
from ..system.signals import Interrupts
from ..tensors.state_leaves import state_leaves
from ..tensors.versions import version_of
from .host_step import HostStep, place_states_on_host, split_by_device
from .step_on import SCALING, Group, StepOutcome, step_window, without_gradients
from .update_operands import (
    GRADIENT,
    ParameterPredicate,
    ParameterUpdate,
    allocate_new_states,
    no_parameters,
    parameter_updates,
)
from .update_unit import keeps_places
from .window_plan import Window, aligned, plan_windows
from .window_views import WindowView, WriteBack, in_buffer, note_writes, range_of, view


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
        self, optimizer: optim.Optimizer, nbytes: int, offloaded: ParameterPredicate, location: BufferLocation | Places,
        on_host: ParameterPredicate = no_parameters, groups: list[Group] | None = None,
        gradient_order: Sequence[Tensor] = (), whole: bool = False,
    ) -> None:  # fmt: skip
        """
        Args:
            nbytes: of a window.
            offloaded: the parameters whose states are offloaded.
            on_host: the parameters that the host updates, if their states are in pinned memory.
            groups: what is updated, with its options; None: those of the optimizer.
            gradient_order: all parameters in the order of their gradients, if these come one by one.
            whole: no parameter is cut, and one is stepped on at a time.

        Raises:
            SpillError: the disk does not take states that have to be offloaded. Nothing has changed.
            UpdateError: two tensors share memory.
            ValueError: the windows are too small for a chunk of some parameter.
        """
        self.optimizer, self.is_scaled = optimizer, any(name in vars(optimizer) for name in SCALING)
        self.groups = optimizer.param_groups if groups is None else groups
        self.in_place = whole and keeps_places(optimizer)
        updates = parameter_updates(optimizer, self.groups, offloaded, location, whole, gradient_order)
        device_updates, host_updates = split_by_device(updates, optimizer, on_host, location_of(location))
        self.updates = [*device_updates, *host_updates]
        self.rows = [update.row for update in self.updates]
        separate = whole or bool(gradient_order)
        device_windows = plan_windows(self.rows[: len(device_updates)], nbytes, separate=separate)
        host_windows = plan_windows(self.rows[len(device_updates) :], nbytes, len(device_updates))
        self.windows, self.first_host_window = device_windows + host_windows, len(device_windows)
        self._allocate_states(host_updates, offloaded, location)
        self.buffers = self._allocate_buffers(device_windows)
        self.host_step: HostStep | None = None
        pinned = location_of(location)
        if host_updates and isinstance(pinned, PinnedBufferAllocator):
            self.host_step = HostStep(optimizer, self.groups, pinned, self._window_nbytes(host_windows))
        self.computed = self.finished = 0  # windows
        self.next_update = 0  # of those whose gradients come one by one
        self.outcome = StepOutcome()
        self.waited_s = 0.0  # for the tier
        self.copies: dict[CopyFunction, list[CopyChunk]] = defaultdict(list)
        self.filled: dict[int, FilledWindow] = {}
        self.drained: dict[int, DrainedWindow] = {}
        self.fingerprints = self._fingerprints()

    def _allocate_states(
        self, host_updates: Sequence[ParameterUpdate], offloaded: ParameterPredicate, location: BufferLocation | Places
    ) -> None:
        counts = Counter(chunk.row for window in self.windows for chunk in window)
        for i, update in enumerate(self.updates):
            update.chunks_left = counts[i]
        allocate_new_states(self.updates, offloaded, location)
        for update in host_updates:
            place_states_on_host(update)

    def _allocate_buffers(self, windows: Sequence[Window]) -> list[Tensor]:
        """Two buffers on the device, or fewer if there are fewer windows."""
        device = self.updates[0].parameter.device if windows else None
        return [torch.empty(self._window_nbytes(windows), dtype=torch.uint8, device=device) for _ in windows[:2]]

    def _window_nbytes(self, windows: Sequence[Window]) -> int:
        """Bytes of the largest of these."""
        sizes = (sum(self.rows[chunk.row].buffer_nbytes(chunk.count) for chunk in window) for window in windows)
        return max(sizes, default=0)

    @property
    def is_done(self) -> bool:
        return self.finished == len(self.windows)

    @property
    def is_started(self) -> bool:
        """True if anything may have changed."""
        return self.computed > 0

    def run(self) -> None:
        """Update all windows that are not done.

        Raises:
            SpillError: the disk failed. The next call resumes after the windows that are done.
        """
        try:
            with self._stoppable() as check, without_gradients(self.groups, self.outcome.cleared):
                self._restart()
                if self.host_step:
                    self.host_step.begin()
                while not self.is_done:
                    self._advance()
                    check()
        finally:
            self.fingerprints = self._fingerprints()

    def update(self, parameter: Tensor, gradient: Tensor) -> None:
        """Compute all windows of one parameter. The last of them are still being written when this returns.

        Raises:
            SpillError: the disk failed, for this parameter or for an earlier one.
        """
        update = self.updates[self.next_update]
        assert update.parameter is parameter, "updates come in the order of the graph"
        try:
            with self._stoppable() as check:
                update.set_gradient(gradient)
                while self.computed < len(self.windows) and self.windows[self.computed][0].row <= self.next_update:
                    self._advance()
                    check()
                self._read_ahead()
        finally:
            update.set_gradient(None)  # frees the gradient
        self.next_update += 1

    def finish(self) -> None:
        """Wait until everything has been written.

        Raises:
            SpillError: the disk failed.
        """
        with Interrupts():
            try:
                while self.finished < self.computed:
                    self._finish(self.finished)
            finally:
                self.stop()

    def stop(self) -> None:
        """Wait until no copy runs, with or without errors."""
        windows: list[FilledWindow | DrainedWindow] = [*self.filled.values(), *self.drained.values()]
        for window in windows:
            finish_copies(*window.copies)

    @contextmanager
    def _stoppable(self) -> Iterator[Callable[[], None]]:
        """Yield what raises a Ctrl-C between two windows; no copy runs after an error."""
        with Interrupts() as interrupts:
            try:
                yield interrupts.check
            except BaseException:
                self.stop()
                raise

    def changed(self) -> str | None:
        """Return what was changed from outside since: "state" (a parameter or a state), "gradient", or None."""
        states, gradients = self._fingerprints()
        return "state" if states != self.fingerprints[0] else "gradient" if gradients != self.fingerprints[1] else None

    def _advance(self) -> None:
        """Compute one window, or finish one if all are computed."""
        current = self.computed
        if current == len(self.windows):
            self._finish(self.finished)
            return
        self._read_ahead()
        if current - self.finished == 2:
            self._finish(self.finished)
        self._compute(current)

    def _host_step_of(self, at: int) -> HostStep | None:
        return self.host_step if at >= self.first_host_window else None

    def _read_ahead(self) -> None:
        """Begin to fill the next two windows, each as soon as its buffer has been written."""
        for at in range(self.computed, min(self.computed + 2, len(self.windows))):
            if at not in self.filled:
                self.filled[at] = self._fill(at)

    def _fill(self, at: int) -> FilledWindow:
        host = self._host_step_of(at)
        if host:
            host.wait()
        before = self.drained.get(at - 2)  # in the same buffer
        after = [chunk for copy in before.copies for chunk in copy.chunks] if before else []
        buffer, begin = (host or self).buffers[at % 2], 0
        filled = FilledWindow([], [])
        for chunk in self.windows[at]:
            update, tensors = self.updates[chunk.row], {}
            for name, operand in update.operands.items():
                if operand.needs_buffer(chunk.whole):
                    end = begin + aligned(operand.chunk_nbytes(chunk))
                    tensors[name] = in_buffer(buffer[begin:end], operand, chunk)
                    begin = end
                else:
                    tensors[name] = view(operand, chunk)
                if slice := operand.copied_slice(chunk.whole):
                    copy = reload_slices(range_of(slice, chunk, operand.tensor.dtype), tensors[name], after)
                    filled.copies.append(self._logged(copy))
            filled.views.append(WindowView(update, chunk, tensors))
        return filled

    def _compute(self, at: int) -> None:
        filled = self.filled[at]
        self._wait(filled.copies)
        for each in filled.views:
            each.take_gradient()
            each.gather()
        versions = [version_of(each.tensors[GRADIENT]) for each in filled.views]
        host = self._host_step_of(at)
        if host:
            writes = host.step(filled.views, self.outcome)
        else:
            writes = step_window(self.optimizer, self.groups, filled.views, self.outcome, self.in_place)
        del self.filled[at]
        self.computed += 1
        for each, version in zip(filled.views, versions, strict=True):
            # Nesterov's momentum with foreach=True works in the gradient; fused updates unscale it without a version.
            writes += each.write_back(version_of(each.tensors[GRADIENT]) > version or self.is_scaled)
            del each.tensors[GRADIENT]
        copies = [self._logged(offload_slices(*each)) for each in writes]
        self.drained[at] = DrainedWindow(filled.views, writes, copies)

    def _logged(self, copy: PendingCopy) -> PendingCopy:
        if isinstance(copy, Copy):  # copies on a stream have no times
            self.copies[copy.move] += copy.chunks
        return copy

    def _finish(self, at: int) -> None:
        drained = self.drained[at]
        self._wait(drained.copies)
        del self.drained[at]
        self.finished += 1
        for each in drained.views:
            each.update.chunks_left -= 1
            if not each.update.chunks_left:
                note_writes(each.update)

    def _wait(self, copies: Sequence[PendingCopy]) -> None:
        begin = time.perf_counter()
        wait_all(copies)
        self.waited_s += time.perf_counter() - begin

    def _restart(self) -> None:
        """Read again what was not computed, and write again what could not be written."""
        self.stop()
        self.filled.clear()
        for drained in self.drained.values():
            for i, copy in enumerate(drained.copies):
                if any(chunk.error for chunk in copy.chunks):
                    drained.copies[i] = offload_slices(*drained.writes[i])

    def _fingerprints(self) -> tuple[list[object], list[object]]:
        """Values that differ if a parameter or state, or a gradient, was replaced or written."""
        parameters = [update.parameter for update in self.updates]
        states = [self.optimizer.state.get(parameter, {}) for parameter in parameters]
        leaves = [leaf.tensor for state in states for leaf in state_leaves(state)]
        scalars = [value for state in states for value in state.values() if isinstance(value, bool | int | float)]
        gradients = [_fingerprint(parameter.grad) for parameter in parameters if parameter.grad is not None]
        return [*map(_fingerprint, (*parameters, *leaves)), *scalars], gradients


def _fingerprint(value: Tensor) -> object:
    return id(value), value.data_ptr(), version_of(value)
