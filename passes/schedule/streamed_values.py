"""Schedule the reloads of streamed state, and the offloads of gradients.

    w is streamed; mm_3 in forward and mm_90 in backward read it, both through its view t
        Stream("w"), Reload("w", back="mm_2", use="t"),
        Reload("w", back="mm_88", use="mm_90"), Recompute("t", before="mm_90")
    its gradient g, made by mm_91
        Offload("g", out="mm_91", free="add_92")

A prefetched value stays for its next use if that comes before a reload would end, and for all micro-batches of a
section.
Prefetches run ahead of their uses by what the link needs, but never by more bytes than two of the largest values.  So a
slow link makes compute wait, and does not fill the device.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..analysis.host_update import host_updated_states
from ..analysis.reuse_gaps import ReuseGaps
from ..ir.decisions import HOST, Decision, Offload, Stream
from ..ir.machine import Machine
from ..ir.trace import Trace

AHEAD = 2  # times the largest value: the bytes of pending copies


@dataclass(frozen=True, slots=True)
class ReloadWindow:
    """A reload for the op at `use`, which may begin before any op from `first` on."""

    value: str
    nbytes: int
    use: int
    first: int


class StreamedValues:
    """Tracks which streamed values are on the device while ops are walked in order."""

    def __init__(
        self, gaps: ReuseGaps, machine: Machine, ahead: Mapping[str, bool], per_use: Container[str] = ()
    ) -> None:
        """`ahead` maps offloaded storages to whether their copies overlap compute; those of `per_use` never stay from
        one use to the next."""
        self.gaps, self.streamable, self.machine = gaps, gaps.streamable, machine
        self.ahead = {storage: early for storage, early in ahead.items() if storage in gaps.streamable.inputs}
        self.gradients = {storage: early for storage, early in ahead.items() if storage in gaps.streamable.gradients}
        self.per_use = per_use
        self.last: dict[str, int] = {}  # the last use of each storage so far
        self.resident: dict[str, set[str]] = {}  # values on the device, by storage
        self.pending: deque[tuple[int, int]] = deque()  # bytes and use of the reloads that may be pending together
        self.pending_nbytes = 0
        self.before = 0  # the use of the last reload before those

    def begin(self) -> list[Decision]:
        """Return the decisions that stream the inputs."""
        on_host = host_updated_states(self.gaps.trace, self.machine, {*self.ahead, *self.gradients})
        values = [self.streamable.inputs[storage] for storage in self.ahead]
        return [Stream(value, HOST if value in on_host else "") for value in values]

    def is_streamed(self, value: str) -> bool:
        """Return True for a streamed input or a view of one."""
        return bool(self.ahead) and self.streamable.views.get(value) in self.ahead

    def is_input(self, value: str) -> bool:
        """Return True if a streamed value is the input itself, and no view."""
        return self.streamable.inputs[self.streamable.views[value]] == value

    @cached_property
    def reads(self) -> dict[int, tuple[str, ...]]:
        """Map each op (by index) before the update to the streamed values that it reads."""
        if not self.ahead:
            return {}
        reads = {i: tuple(filter(self.is_streamed, values)) for i, values in self.streamable.reads.items()}
        return {i: values for i, values in reads.items() if values}

    def note_run(self, index: int) -> None:
        """Note that the op at `index` has run."""
        name = self.gaps.trace.ops[index].name
        if self.is_streamed(name):
            self.note_view(name)

    def has(self, value: str, index: int) -> bool:
        """Return True if a streamed value stays on the device for the op at `index`."""
        storage = self.streamable.views[value]
        if value not in self.resident.get(storage, ()):
            return False
        begins, last = self.gaps.begins, self.last[storage]
        # A value that is reloaded for each use frees its bytes in between, however slow the link.
        stays = self.ahead[storage] and storage not in self.per_use
        reload_us = self.gaps.trace.nbytes[storage] / self.machine.link.back if stays else 0.0
        if begins[index] - begins[last] > reload_us and not self._is_one_section(last, index):
            self.resident[storage] = set()
            return False
        self.last[storage] = index
        return True

    def _is_one_section(self, first: int, second: int) -> bool:
        """Return True if two ops belong to one section in one phase: one reload serves all micro-batches."""
        one, other = self.gaps.trace.ops[first], self.gaps.trace.ops[second]
        return one.section == other.section > 0 and one.phase == other.phase

    def reload(self, value: str, index: int) -> ReloadWindow:
        """Return the reload of a streamed value for the op at `index`."""
        storage = self.streamable.views[value]
        nbytes = self.gaps.trace.nbytes[storage]
        self._make_room(nbytes, index)
        after_last = self.last.get(storage, -1) + 1
        first = max(self.before, after_last, self._phase(index)) if self.ahead[storage] else index
        self.resident[storage], self.last[storage] = {value}, index
        return ReloadWindow(value, nbytes, index, first)

    def note_view(self, value: str) -> None:
        """Note that a view of a value on the device has been made."""
        self.resident.setdefault(self.streamable.views[value], set()).add(value)

    def _make_room(self, nbytes: int, index: int) -> None:
        """Let earlier reloads end first if too many bytes would be pending."""
        self.pending.append((nbytes, index))
        self.pending_nbytes += nbytes
        while self.pending_nbytes > self.room:
            nbytes, self.before = self.pending.popleft()
            self.pending_nbytes -= nbytes

    @cached_property
    def room(self) -> int:
        """Return the bytes of reloads that may be pending."""
        storages = {self.streamable.views[value] for values in self.reads.values() for value in values}
        return AHEAD * max((self.gaps.trace.nbytes[storage] for storage in storages), default=0)

    def _phase(self, index: int) -> int:
        """Return the first op of the phase of the op at `index`."""
        return self.gaps.trace.boundary if index >= self.gaps.trace.boundary else self.first_op

    @cached_property
    def first_op(self) -> int:
        """Return the first op that is no input."""
        return next((i for i, op in enumerate(self.gaps.trace.ops) if not op.is_input), 0)

    def offload_gradients(self) -> list[Decision]:
        """Return the decisions that offload gradients."""
        ops, begins = self.gaps.trace.ops, self.gaps.begins
        outs = sorted((self.streamable.last_use[storage], storage) for storage in self.gradients)
        room = AHEAD * max((self.gaps.trace.nbytes[storage] for _, storage in outs), default=0)
        idle, decisions = 0.0, list[Decision]()
        for k, (out, storage) in enumerate(outs):
            idle = max(idle, begins[out + 1]) + self.gaps.trace.nbytes[storage] / self.machine.link.out
            ended = max(out, bisect.bisect_left(begins, idle) - 1)
            value, free = self.streamable.gradients[storage], out
            if self.gradients[storage]:
                free = min(ended, self._crowded(outs[k:], room), self.streamable.offload_deadline(value))
            decisions.append(Offload(value, ops[out].name, ops[max(out, free)].name))
        return decisions

    def _crowded(self, outs: Sequence[tuple[int, str]], room: int) -> int:
        """Return the op at which the first of `outs` has to be freed, so that no more than `room` bytes are pending."""
        for out, storage in outs:
            room -= self.gaps.trace.nbytes[storage]
            if room < 0:
                return out
        return len(self.gaps.trace.ops) - 1


def updates_of(trace: Trace, offloaded: Container[str]) -> set[int]:
    """Return the updates in backward (by index) that read `offloaded` storages."""
    return {
        i
        for i, op in enumerate(trace.ops[:-1])
        if op.phase == "update" and any(held in offloaded for value in op.reads for held in trace.op[value].holds)
    }
