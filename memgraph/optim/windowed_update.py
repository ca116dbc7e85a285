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

from ..storage.async_copy import CopiedBytes, Copy, CopyRequest, finish_copies
from ..storage.io_threads import read, write
from ..storage.mapped_storage import BufferLocation
from ..storage.pinned_storage import PinnedBufferAllocator
from ..storage.transfer import Copying, offload_slices, reload_slices, wait_all
from ..system.signals import Interrupts
from ..tensors.versions import version_of
from .host_step import HostStep, split_parts, states_on_host
from .optimizer_clone import ClonedOptimizer
from .update_operands import GRADIENT, PARAMETER, Whose, make_places, no_operands, parameter_updates
from .window_plan import Window, aligned, plan_windows
from .window_views import WindowView, WriteBack, commit, in_buffer, range_of, state_of, view

__all__ = ["WindowedUpdate", "view"]


@dataclass(frozen=True)
class FilledWindow:
    """A window that has been begun to be filled."""

    cuts: list[WindowView]
    copies: list[Copying]


@dataclass(frozen=True)
class DrainedWindow:
    """A window that was computed and has been begun to be drained."""

    cuts: list[WindowView]
    writes: list[WriteBack]
    copies: list[Copying]


class WindowedUpdate:
    """One update of an optimizer. `run` may be called again when it has failed."""

    def __init__(
        self, optimizer: optim.Optimizer, nbytes: int, far_states: Whose, where: BufferLocation, loss: Any = None,
        hosted: Whose = no_operands, awaited: Sequence[Tensor] = (),
    ) -> None:  # fmt: skip
        """`hosted`: the parameters that are stepped on the host, if that has their states; `awaited`: all parameters of
        the optimizer, in this order, if their gradients come one by one.

        Raises:
            SpillError: the disk does not take states that have to go there. Nothing has changed.
            UpdateError: two parameters lie on one place.
            ValueError: the windows are too small for a piece of some parameter.
        """
        self.optimizer, self.loss = optimizer, loss
        self.stepper = ClonedOptimizer(optimizer)
        order = {parameter: i for i, parameter in enumerate(awaited)}
        found = parameter_updates(optimizer, self.stepper, far_states, where, bool(awaited))
        found.sort(key=lambda subject: order.get(subject.parameter, 0))
        here, there = split_parts(found, self.stepper, hosted, where)
        self.subjects = [*here, *there]
        own = plan_windows([subject.row for subject in here], nbytes, apart=bool(awaited))
        self.turn = len(own)  # of the windows from this one on, which are the host's
        self.windows = own + plan_windows([subject.row for subject in there], nbytes, len(here))
        for window in self.windows:
            for piece in window:
                self.subjects[piece.row].left += 1
        make_places(self.subjects, far_states, where)
        for subject in there:
            states_on_host(subject)
        device = here[0].parameter.device if here else None
        self.slabs = [torch.empty(self._most(own), dtype=torch.uint8, device=device) for _ in own[:2]]
        most = self._most(self.windows[self.turn :])
        self.host_step = (
            HostStep(optimizer, where, most) if there and isinstance(where, PinnedBufferAllocator) else None
        )
        self.computed = self.finished = 0  # windows
        self.waited = 0.0  # seconds for the far tier
        self.moved: CopiedBytes = {write: [], read: []}
        self.filled: dict[int, FilledWindow] = {}
        self.drained: dict[int, DrainedWindow] = {}
        self.seen = self._marks()

    def _most(self, windows: Sequence[Window]) -> int:
        """The room that one of these takes."""
        rows = [subject.row for subject in self.subjects]
        return max((sum(rows[piece.row].room(piece.count) for piece in window) for window in windows), default=0)

    @property
    def done(self) -> bool:
        return self.finished == len(self.windows)

    @property
    def begun(self) -> bool:
        """Whether anything may have changed."""
        return self.computed > 0

    def run(self) -> None:
        """Update all windows that are not done.

        Raises:
            SpillError: the disk failed. What is done is known, and the next call goes on.
        """
        with Interrupts() as interrupts:
            try:
                self._begin_anew()
                if self.host_step:
                    self.host_step.begin()
                while not self.done:
                    self._advance()
                    interrupts.check()
            except BaseException:
                self._settle()
                raise
            finally:
                self.seen = self._marks()

    def changed(self) -> str | None:
        """What somebody has changed since: "state" (a parameter or a state), "gradient", or None."""
        states, gradients = self._marks()
        return "state" if states != self.seen[0] else "gradient" if gradients != self.seen[1] else None

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
        return self.host_step if at >= self.turn else None

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
        after = [part for copy in before.copies for part in copy.parts] if before else []
        slab, begin = (host or self).slabs[at % 2], 0
        filled = FilledWindow([], [])
        for piece in self.windows[at]:
            subject, tensors = self.subjects[piece.row], {}
            for name, strand in subject.strands.items():
                if strand.roomy(piece.whole):
                    room = aligned(piece.count * strand.tensor.dtype.itemsize)
                    tensors[name] = in_buffer(slab[begin : begin + room], strand, piece)
                    begin += room
                else:
                    tensors[name] = view(strand, piece)
                if place := strand.source(piece.whole):
                    copy = reload_slices(range_of(place, piece, strand.tensor.dtype), tensors[name], after)
                    filled.copies.append(self._noted(read, copy))
            filled.cuts.append(WindowView(subject, piece, tensors, state_of(subject, piece, tensors)))
        return filled

    def _compute(self, at: int) -> None:
        filled = self.filled[at]
        self._wait(filled.copies)
        given = []
        for one in filled.cuts:
            one.gather()
            piece = one.tensors[PARAMETER]
            piece.grad = one.tensors[GRADIENT]
            given.append((one.subject.group, piece, one.state))
        versions = [version_of(one.tensors[GRADIENT]) for one in filled.cuts]
        states = (self._on_host(at) or self.stepper).step(given)
        del self.filled[at]
        self.computed += 1
        writes: list[WriteBack] = []
        for one, state, version in zip(filled.cuts, states, versions, strict=True):
            # Nesterov's momentum with foreach=True works in the gradient; fused updates unscale it, and do not say so.
            written = version_of(one.tensors[GRADIENT]) > version or bool(self.stepper.scaling)
            writes += one.changed(written) + one.made(state or {})
            one.state.clear()  # its numbers are the subject's now
        self.drained[at] = DrainedWindow(
            filled.cuts, writes, [self._noted(write, offload_slices(*each)) for each in writes]
        )

    def _noted(self, move: CopyRequest, copy: Copying) -> Copying:
        if isinstance(copy, Copy):  # what a stream copies keeps no times
            self.moved[move] += copy.parts
        return copy

    def _finish(self, at: int) -> None:
        drained = self.drained[at]
        self._wait(drained.copies)
        del self.drained[at]
        self.finished += 1
        for one in drained.cuts:
            one.subject.left -= 1
            if not one.subject.left:
                commit(self.optimizer, one.subject)
                one.subject.scalars.clear()  # they would stay as long as the update

    def _wait(self, copies: Sequence[Copying]) -> None:
        begin = time.perf_counter()
        wait_all(copies)
        self.waited += time.perf_counter() - begin

    def _begin_anew(self) -> None:
        """Read again what was not computed, and write again what could not be written."""
        self._settle()
        self.filled.clear()
        for drained in self.drained.values():
            for i, copy in enumerate(drained.copies):
                if any(part.error for part in copy.parts):
                    drained.copies[i] = offload_slices(*drained.writes[i])

    def _settle(self) -> None:
        """Wait until no copy is under way."""
        windows: list[FilledWindow | DrainedWindow] = [*self.filled.values(), *self.drained.values()]
        for window in windows:
            finish_copies(*window.copies)

    def _marks(self) -> tuple[list[object], list[object]]:
        """What tells whether a parameter or a state, or a gradient, is another or was written."""
        found = [subject.parameter for subject in self.subjects]
        states = [value for parameter in found for value in self.optimizer.state.get(parameter, {}).values()]
        return [_mark(value) for value in (*found, *states)], [_mark(parameter.grad) for parameter in found]


def _mark(value: Any) -> object:
    if not isinstance(value, Tensor):
        return value
    return id(value), value.data_ptr(), version_of(value)
