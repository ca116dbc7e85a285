"""What lies on the device at every op of a trace, and what every queue does when.

    predict(trace, machine) -> Forecast: 18.9 MB at mm_7, 2730 us

Bytes: what is alive before an op, what it makes, and its workspace; the copies' staging throughout, if there are
copies. Time: four queues.  Compute runs the ops one after the other, casts among them; `out` and `back` carry copies,
`net` what ranks exchange, each first in, first out; `out` and `back` are one where the tier carries one way at a time.
`free`, `wait`, `reduced` and `gathered` hold compute until theirs has ended.  What a copy takes of compute
itself (`Link.overhead_us`, `Network.interference`) is charged where it begins.

An update of what is far goes through windows: it takes as long as it computes, or as the tier carries, whichever is
longer.  With `Streaming.update_staging` its first windows are filled from the end of the update before on, and its
last ones leave behind it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ..ir import ops
from ..ir.liveness import Lifetime, Span, lifetimes, spans
from ..ir.machine import Machine
from ..ir.ops import FREE, GATHER, GATHERED, OFFLOAD, REDUCE_SCATTER, REDUCED, WAIT, is_runtime, sent_nbytes
from ..ir.trace import Op, Trace, type_nbytes

KINDS = (
    "parameter",
    "buffer",
    "state",
    "input",
    "gradient",
    "tangent",
    "output",
    "activation",
    "temporary",
    "workspace",
    "staging",
)
Bytes = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Copy:
    """A transfer on a link: the value, the queue ("out", "back" or "net"), and when it begins and ends in
    microseconds."""

    value: str
    queue: str
    begin: float
    end: float


@dataclass(frozen=True, eq=False)
class Forecast:
    """A trace's bytes and time.  Arrays have one entry an op.  Bytes are counted when they are asked for: of most plans
    that are tried only the time is, or the peak."""

    trace: Trace
    machine: Machine
    begins: tuple[float, ...]  # microseconds at which each op begins
    us: float
    copies: tuple[Copy, ...]

    @cached_property
    def lifetimes(self) -> tuple[Lifetime, ...]:
        return lifetimes(self.trace, self._spans)

    @cached_property
    def by_kind(self) -> dict[str, Bytes]:
        change = {kind: np.zeros(len(self.trace.ops) + 1, dtype=np.int64) for kind in KINDS}
        for life in self.lifetimes:
            change[life.kind][life.first] += life.nbytes
            change[life.kind][life.last + 1] -= life.nbytes
        by_kind = {kind: np.cumsum(steps[:-1]) for kind, steps in change.items()}
        by_kind["workspace"] = _workspaces(self.trace, self.machine)
        by_kind["staging"] = np.full(len(self.trace.ops), self._staging, dtype=np.int64)
        return by_kind

    @cached_property
    def total(self) -> Bytes:
        """The sum of all kinds."""
        change = [0] * (len(self.trace.ops) + 1)
        for _, made, first, last in self._spans:
            change[first] += made.nbytes
            change[last + 1] -= made.nbytes
        there: Bytes = np.cumsum(np.array(change[:-1], dtype=np.int64))
        return there + _workspaces(self.trace, self.machine) + self._staging

    @cached_property
    def _spans(self) -> tuple[Span, ...]:
        return tuple(spans(self.trace))

    @property
    def _staging(self) -> int:
        return self.machine.link.staging if any(copy.queue != "net" for copy in self.copies) else 0

    @cached_property
    def peak_index(self) -> int:
        """The index of the first op at the peak."""
        return int(np.argmax(self.total)) if len(self.total) else 0

    @property
    def peak(self) -> int:
        return int(self.total[self.peak_index]) if len(self.total) else 0

    @cached_property
    def retained(self) -> int:
        """The peak if backward lets nothing go that forward had saved for it, or goes through the same a second time,
        when its gradients come beside those that are there."""
        turn, kept = self.trace.boundary, np.zeros(len(self.total) + 1, dtype=np.int64)
        for life in self.lifetimes:
            if life.first < turn <= life.last:
                kept[life.last + 1] += life.nbytes
        gradients = int(self.by_kind["gradient"].max(initial=0))
        return max(int((self.total + np.cumsum(kept)[:-1]).max(initial=0)), self.peak + gradients)

    def live_at(self, index: int) -> tuple[Lifetime, ...]:
        """What is on the device while op `index` runs, the largest first."""
        there = [span for span in self._spans if span[2] <= index <= span[3]]
        return tuple(sorted(lifetimes(self.trace, there), key=lambda life: -life.nbytes))

    def __str__(self) -> str:
        where = self.trace.ops[self.peak_index].name if self.trace.ops else "nothing"
        return f"{self.peak} bytes at {where}, {self.us:.0f} us"


def predict(trace: Trace, machine: Machine) -> Forecast:
    """The one function that knows what is on the device when, and what overlaps."""
    begins, us, copies = _clock(trace, machine)
    return Forecast(trace, machine, begins, us, copies)


def offloaded_reads(trace: Trace, op: Op) -> tuple[Op, ...]:
    """What an op of the update reads where it lies in the far tier: inputs, and tickets of what has left."""
    found = (trace.op[read] for read in op.reads) if op.phase == "update" else ()
    return tuple(read for read in found if read.offloaded or read.fn == OFFLOAD)


def _workspaces(trace: Trace, machine: Machine) -> Bytes:
    """What each op takes for itself, and what windows of updates take between these."""
    taken = np.array([op.workspace for op in trace.ops], dtype=np.int64)
    windowed = [i for i, op in enumerate(trace.ops) if op.phase == "update" and offloaded_reads(trace, op)]
    if windowed:
        taken[windowed[0] + 1 :] += machine.streaming.update_staging
        taken[windowed] = machine.streaming.window
    return taken


def update_nbytes(trace: Trace, op: Op) -> tuple[int, int]:
    """What comes for an update, and what goes: all that is far, there and back but for gradients; for what is updated
    on the host, all that is not."""
    come, go, hosted = 0, 0, False
    for read in map(trace.op.__getitem__, op.reads):
        hosted = read.on_host if read.fn == "state" else hosted  # and so is what stands behind it
        far, written = read.offloaded or read.fn == OFFLOAD, read.fn in ("parameter", "state")
        nbytes = max(0, type_nbytes((trace.op[read.reads[0]] if read.fn == OFFLOAD else read).type))
        if far and not hosted:
            come, go = come + nbytes, go + nbytes * written
        elif hosted and not far:
            come, go = come + nbytes * written, go + nbytes
    return come, go


def host_update_us(trace: Trace, op: Op, machine: Machine) -> float:
    """What the host takes for the states of an update that it steps on."""
    there = sum(type_nbytes(trace.op[read].type) for read in op.reads if trace.op[read].on_host)
    return there / (machine.streaming.host_update_rate or 1.0)


def staged_share(trace: Trace, op: Op, machine: Machine) -> float:
    """How much of what an update reads goes through windows that are there before it and behind it."""
    nbytes = sum(max(0, type_nbytes(trace.op[read].type)) for read in op.reads)
    return min(1.0, machine.streaming.update_staging / nbytes) if nbytes else 0.0


def _clock(trace: Trace, machine: Machine) -> tuple[tuple[float, ...], float, tuple[Copy, ...]]:
    """When each op begins, when the last ends, and the copies."""
    now, queues = 0.0, Queues(trace, machine)
    begins: list[float] = []
    for op in trace.ops:
        begins.append(now)
        if op.phase != "update" and not is_runtime(op.fn):
            now += op.us  # nearly all are of these
            continue
        now = queues.run(now, op)
    return tuple(begins), max(now, queues.written), tuple(queues.copies)


class Queues:
    """What carries bytes, each first in, first out, while the ops of a trace run in their order."""

    def __init__(self, trace: Trace, machine: Machine) -> None:
        self.trace, self.machine = trace, machine
        self.rate = {
            "out": machine.link.out or 1.0,
            "back": machine.link.back or 1.0,
            "net": machine.network.rate or math.inf,
        }
        self.idle = dict.fromkeys(self.rate, 0.0)
        self.ends: dict[str, float] = {}
        self.copies: list[Copy] = []
        self.written = 0.0  # when the last update has left
        self.updates = [op for op in trace.ops if op.phase == "update" and any(update_nbytes(trace, op))]
        self.filled: float | None = None  # when the first windows of the next update are

    def run(self, now: float, op: Op) -> float:
        """Run an op; when compute goes on."""
        machine, trace = self.machine, self.trace
        match op.fn:
            case ops.OFFLOAD:
                return self.send(now, op.name, "out", trace.nbytes[trace.op[op.reads[0]].holds[0]])
            case ops.RELOAD:
                return self.send(now, op.name, "back", op.nbytes)
            case ops.NARROW:
                return now + trace.nbytes[trace.op[op.reads[0]].holds[0]] / (machine.cast.out or 1.0)
            case ops.WIDEN:
                return now + op.nbytes / (machine.cast.back or 1.0)
            case _ if op.fn in (REDUCE_SCATTER, GATHER):
                return self.send(now, op.name, "net", sent_nbytes(trace, op))
            case _ if op.fn in (FREE, WAIT, REDUCED, GATHERED):
                return max(now, self.ends[op.reads[0]])
            case _:
                return self.update(now, op) if op.phase == "update" else now + op.us

    def send(self, now: float, value: str, queue: str, nbytes: int) -> float:
        """Put a copy into its queue; when compute goes on."""
        begin = max(now, self.idle[queue])
        latency = self.machine.network.latency_us if queue == "net" else 0.0
        end = self.ends[value] = self._carry(queue, begin + latency, nbytes)
        self.copies.append(Copy(value, queue, begin, end))
        if queue == "net":
            return now + min(self.machine.network.interference, 1.0) * (end - begin)
        return now + self.machine.link.overhead_us(nbytes)

    def update(self, now: float, op: Op) -> float:
        """Compute an update, in windows if some of it is far; when compute goes on."""
        come, go = update_nbytes(self.trace, op)
        stepped = host_update_us(self.trace, op, self.machine)
        if not come + go:
            return now + max(op.us, stepped)
        begin = max(now, self.idle["back"]) if self.machine.link.half_duplex else now
        early = staged_share(self.trace, op, self.machine)
        waits, fetched = (now, 0.0) if self.filled is None else (max(now, self.filled), early)
        end = self._carry("out", self._carry("back", begin, (1 - fetched) * come), (1 - early) * go)
        now = max(waits + op.us, end, now + stepped)
        self.written = self._carry("out", max(now, end), early * go)
        self.updates.pop(0)
        if self.updates and self.machine.streaming.update_staging:
            following = self.updates[0]
            share = staged_share(self.trace, following, self.machine)
            self.filled = self._carry("back", self.written, share * update_nbytes(self.trace, following)[0])
        return now

    def _carry(self, queue: str, begin: float, nbytes: float) -> float:
        """Carry bytes from `begin` on; when they are there."""
        end = begin + nbytes / self.rate[queue]
        for name in ("out", "back") if self.machine.link.half_duplex and queue != "net" else (queue,):
            self.idle[name] = max(self.idle[name], end)
        return end
