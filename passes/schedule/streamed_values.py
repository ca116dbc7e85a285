"""When what lives in the far tier comes to the device, and when a gradient leaves for it.

    w is far, read by mm_3 in forward and mm_90 in backward, its view t by both
        Stream("w"), Reload("w", back="mm_2", use="t"),
        Reload("w", back="mm_88", use="mm_90"), Recompute("t", before="mm_90")
    its gradient g, made by mm_91
        Offload("g", out="mm_91", free="add_92")

A value that is fetched ahead stays for its next use where fetching it again would take longer than that lasts; any
stays for all micro-batches of a slice.  Fetches run ahead of their uses by what the link needs, and never by more bytes
than two of the largest: so a link that can't keep up makes compute wait, and does not fill the device.
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

AHEAD = 2  # of the largest: the bytes that are under way


@dataclass(frozen=True, slots=True)
class ReloadWindow:
    """Something comes back for the op at `use`; it may begin before any op from `first` on."""

    value: str
    nbytes: int
    use: int
    first: int


class StreamedValues:
    """Which streamed values are there, while the steps' ops are walked in order."""

    def __init__(
        self, gaps: ReuseGaps, machine: Machine, ahead: Mapping[str, bool], passing: Container[str] = ()
    ) -> None:
        """`ahead`: the storages whose home is far, and whether they are fetched ahead of their use; `passing`: those of
        them that do not stay from one use to the next."""
        self.gaps, self.streamable, self.machine = gaps, gaps.streamable, machine
        self.ahead = {storage: early for storage, early in ahead.items() if storage in gaps.streamable.inputs}
        self.sent = {storage: early for storage, early in ahead.items() if storage in gaps.streamable.gradients}
        self.passing = passing
        self.last: dict[str, int] = {}
        self.there: dict[str, set[str]] = {}
        self.latest: deque[tuple[int, int]] = deque()  # bytes and use of as many fetches as may be under way together
        self.nbytes = 0  # of these
        self.before = 0  # the use of the one before them

    def begin(self) -> list[Decision]:
        """What says that the values are far, and which states are updated there."""
        there = host_updated_states(self.gaps.trace, self.machine, {*self.ahead, *self.sent})
        values = [self.streamable.inputs[storage] for storage in self.ahead]
        return [Stream(value, HOST if value in there else "") for value in values]

    def knows(self, value: str) -> bool:
        """Whether a value shows what is far."""
        return bool(self.ahead) and self.streamable.views.get(value) in self.ahead

    def is_home(self, value: str) -> bool:
        """Whether a value that shows what is far is all of it itself, and not a view."""
        return self.streamable.inputs[self.streamable.views[value]] == value

    @cached_property
    def visits(self) -> dict[int, tuple[str, ...]]:
        """For each op (by index) before the update what it reads of what is far."""
        if not self.ahead:
            return {}
        found = {i: tuple(filter(self.knows, values)) for i, values in self.streamable.reads.items()}
        return {i: values for i, values in found.items() if values}

    def passed(self, index: int) -> None:
        """The op at `index` has run: if it is a view of what is there, so is its value."""
        name = self.gaps.trace.ops[index].name
        if self.knows(name):
            self.made(name)

    def has(self, value: str, index: int) -> bool:
        """Whether a streamed value is there for the op at `index`, from an earlier use."""
        storage = self.streamable.views[value]
        if value not in self.there.get(storage, ()):
            return False
        begins, last = self.gaps.begins, self.last[storage]
        # What is fetched when it is used leaves room in between, however slow the link: only views take no time.
        waits = self.ahead[storage] and storage not in self.passing
        worth = self.gaps.trace.nbytes[storage] / self.machine.link.back if waits else 0.0
        if begins[index] - begins[last] > worth and not self._is_one_slice(last, index):
            self.there[storage] = set()
            return False
        self.last[storage] = index
        return True

    def _is_one_slice(self, first: int, second: int) -> bool:
        """Whether two ops are of one slice in one phase: what the one has fetched serves all micro-batches."""
        one, other = self.gaps.trace.ops[first], self.gaps.trace.ops[second]
        return one.slice == other.slice > 0 and one.phase == other.phase

    def fetch(self, value: str, index: int) -> ReloadWindow:
        """Fetch a streamed value for the op at `index`."""
        storage = self.streamable.views[value]
        nbytes = self.gaps.trace.nbytes[storage]
        self._make_room(nbytes, index)
        after_last = self.last.get(storage, -1) + 1
        first = max(self.before, after_last, self._phase(index)) if self.ahead[storage] else index
        self.there[storage], self.last[storage] = {value}, index
        return ReloadWindow(value, nbytes, index, first)

    def made(self, value: str) -> None:
        """A view of what is there has been made."""
        self.there.setdefault(self.streamable.views[value], set()).add(value)

    def _make_room(self, nbytes: int, index: int) -> None:
        """Let those be over before the next fetch begins with which too much would be under way."""
        self.latest.append((nbytes, index))
        self.nbytes += nbytes
        while self.nbytes > self.room:
            gone, self.before = self.latest.popleft()
            self.nbytes -= gone

    @cached_property
    def room(self) -> int:
        """The bytes of fetches that may be under way."""
        visited = {self.streamable.views[value] for values in self.visits.values() for value in values}
        return AHEAD * max((self.gaps.trace.nbytes[storage] for storage in visited), default=0)

    def _phase(self, index: int) -> int:
        """The first op of the phase of the op at `index`."""
        return self.gaps.trace.boundary if index >= self.gaps.trace.boundary else self.first_op

    @cached_property
    def first_op(self) -> int:
        """The first op that is no input."""
        return next((i for i, op in enumerate(self.gaps.trace.ops) if not op.is_input), 0)

    def leave(self) -> list[Decision]:
        """What sends the gradients to their homes."""
        ops, begins = self.gaps.trace.ops, self.gaps.begins
        outs = sorted((self.streamable.last_use[storage], storage) for storage in self.sent)
        room = AHEAD * max((self.gaps.trace.nbytes[storage] for _, storage in outs), default=0)
        idle, decisions = 0.0, list[Decision]()
        for k, (out, storage) in enumerate(outs):
            idle = max(idle, begins[out + 1]) + self.gaps.trace.nbytes[storage] / self.machine.link.out
            ended = max(out, bisect.bisect_left(begins, idle) - 1)
            value, free = self.streamable.gradients[storage], out
            if self.sent[storage]:
                free = min(ended, self._crowded(outs[k:], room), self.streamable.offload_deadline(value))
            decisions.append(Offload(value, ops[out].name, ops[max(out, free)].name))
        return decisions

    def _crowded(self, outs: Sequence[tuple[int, str]], room: int) -> int:
        """The op at which the first of `outs` has to be gone, lest more than `room` bytes are under way."""
        for out, storage in outs:
            room -= self.gaps.trace.nbytes[storage]
            if room < 0:
                return out
        return len(self.gaps.trace.ops) - 1


def updates_of(trace: Trace, far: Container[str]) -> set[int]:
    """The updates in backward (by index) that read what is `far`: storages, by name."""
    return {
        i
        for i, op in enumerate(trace.ops[:-1])
        if op.phase == "update" and any(held in far for value in op.reads for held in trace.op[value].holds)
    }
