"""Forecast the bytes on the device at every op of a trace, and the time of every queue.

    predict(trace, machine) -> Forecast: 18.9 MB at mm_7, 2730 us

Bytes: what is live before an op, what it makes, and its workspace; the staging of copies throughout, if there are any.

Time: compute runs the ops one after the other, casts included.  The queues `out` and `back` carry copies, and `net`
collectives, each first in, first out.  On a half-duplex link `out` and `back` are one queue.  `free`, `wait`, `reduced`
and `gathered` make compute wait for their copy or collective.  What that takes of compute itself (`Link.overhead_us`,
`Network.interference`) is charged where it begins.

An update that reads from the tier runs in windows, for as long as compute or the link needs, whichever is longer.  With
`Streaming.update_staging` its first windows are reloaded from the end of the update before on, and its last windows are
offloaded while the next ops run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..ir import ops
from ..ir.arrays import Ints
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


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy or a collective: its value, its queue ("out", "back" or "net"), its begin and its end in microseconds."""

    value: str
    queue: str
    begin: float
    end: float


@dataclass(frozen=True, eq=False)
class Forecast:
    """Bytes and time of a trace.  Arrays have one entry an op.

    Bytes are counted on demand: of most plans a search needs only the time or the peak.
    """

    trace: Trace
    machine: Machine
    begins: tuple[float, ...]  # microseconds at which each op begins
    us: float
    copies: tuple[Copy, ...]

    @cached_property
    def lifetimes(self) -> tuple[Lifetime, ...]:
        return lifetimes(self.trace, self._spans)

    @cached_property
    def by_kind(self) -> dict[str, Ints]:
        change = {kind: np.zeros(len(self.trace.ops) + 1, dtype=np.int64) for kind in KINDS}
        for life in self.lifetimes:
            change[life.kind][life.first] += life.nbytes
            change[life.kind][life.last + 1] -= life.nbytes
        by_kind = {kind: np.cumsum(steps[:-1]) for kind, steps in change.items()}
        by_kind["workspace"] = _workspaces(self.trace, self.machine)
        by_kind["staging"] = np.full(len(self.trace.ops), self.staging, dtype=np.int64)
        return by_kind

    @cached_property
    def total(self) -> Ints:
        """Return the sum of all kinds."""
        change = [0] * (len(self.trace.ops) + 1)
        for _, made, first, last in self._spans:
            change[first] += made.nbytes
            change[last + 1] -= made.nbytes
        live: Ints = np.cumsum(np.array(change[:-1], dtype=np.int64))
        return live + _workspaces(self.trace, self.machine) + self.staging

    @cached_property
    def _spans(self) -> tuple[Span, ...]:
        return tuple(spans(self.trace))

    @property
    def staging(self) -> int:
        """Return the bytes that copies are staged in: 0 if there are none."""
        return self.machine.link.staging if any(copy.queue != "net" for copy in self.copies) else 0

    @cached_property
    def peak_index(self) -> int:
        """Return the index of the first op at the peak."""
        return int(np.argmax(self.total)) if len(self.total) else 0

    @property
    def peak(self) -> int:
        return int(self.total[self.peak_index]) if len(self.total) else 0

    @cached_property
    def retained(self) -> int:
        """Return the peak of backward(retain_graph=True), which frees nothing that forward saved, or of running
        backward twice, which adds a second set of gradients."""
        boundary, saved = self.trace.boundary, np.zeros(len(self.total) + 1, dtype=np.int64)
        for life in self.lifetimes:
            if life.first < boundary <= life.last:
                saved[life.last + 1] += life.nbytes
        gradients = int(self.by_kind["gradient"].max(initial=0))
        return max(int((self.total + np.cumsum(saved)[:-1]).max(initial=0)), self.peak + gradients)

    def live_at(self, index: int) -> tuple[Lifetime, ...]:
        """Return what is on the device while op `index` runs, the largest first."""
        live = [span for span in self._spans if span[2] <= index <= span[3]]
        return tuple(sorted(lifetimes(self.trace, live), key=lambda life: -life.nbytes))

    def __str__(self) -> str:
        where = self.trace.ops[self.peak_index].name if self.trace.ops else "nothing"
        return f"{self.peak} bytes at {where}, {self.us:.0f} us"


def predict(trace: Trace, machine: Machine) -> Forecast:
    """Simulate a trace on a machine."""
    begins, us, copies = _clock(trace, machine)
    return Forecast(trace, machine, begins, us, copies)


def offloaded_reads(trace: Trace, op: Op) -> tuple[Op, ...]:
    """Return what an update reads from the tier: offloaded inputs and gradients."""
    reads = (trace.op[read] for read in op.reads) if op.phase == "update" else ()
    return tuple(read for read in reads if read.offloaded or read.fn == OFFLOAD)


def _workspaces(trace: Trace, machine: Machine) -> Ints:
    """Return the workspace of each op, with the windows of updates and what stays nbytes between them."""
    nbytes = np.array([op.workspace for op in trace.ops], dtype=np.int64)
    windowed = [i for i, op in enumerate(trace.ops) if op.phase == "update" and offloaded_reads(trace, op)]
    if windowed:
        nbytes[windowed[0] + 1 :] += machine.streaming.update_staging
        nbytes[windowed] = machine.streaming.window
    return nbytes


def update_nbytes(trace: Trace, op: Op) -> tuple[int, int]:
    """Return the bytes that an update reloads, and those that it offloads.

    On the device it reloads all that is offloaded, and offloads what it has written.  On the host it is the other way
    round: it offloads all that is on the device, and reloads what it has written.
    """
    back, out, on_host = 0, 0, False
    for read in map(trace.op.__getitem__, op.reads):
        on_host = read.on_host if read.fn == "state" else on_host  # with the parameter and the gradient behind it
        offloaded, written = read.offloaded or read.fn == OFFLOAD, read.fn in ("parameter", "state")
        nbytes = max(0, type_nbytes((trace.op[read.reads[0]] if read.fn == OFFLOAD else read).type))
        if offloaded and not on_host:
            back, out = back + nbytes, out + nbytes * written
        elif on_host and not offloaded:
            back, out = back + nbytes * written, out + nbytes
    return back, out


def host_update_us(trace: Trace, op: Op, machine: Machine) -> float:
    """Return the microseconds that the host takes for the states of an update."""
    nbytes = sum(type_nbytes(trace.op[read].type) for read in op.reads if trace.op[read].on_host)
    return nbytes / (machine.streaming.host_update_rate or 1.0)


def staged_share(trace: Trace, op: Op, machine: Machine) -> float:
    """Return the share of an update that is reloaded before it, and offloaded behind it."""
    nbytes = sum(max(0, type_nbytes(trace.op[read].type)) for read in op.reads)
    return min(1.0, machine.streaming.update_staging / nbytes) if nbytes else 0.0


def _clock(trace: Trace, machine: Machine) -> tuple[tuple[float, ...], float, tuple[Copy, ...]]:
    """Return the begin of each op, the end of the last, and the copies."""
    now, queues = 0.0, Queues(trace, machine)
    begins: list[float] = []
    for op in trace.ops:
        begins.append(now)
        if op.phase != "update" and not is_runtime(op.fn):
            now += op.us  # nearly all ops
            continue
        now = queues.run(now, op)
    return tuple(begins), max(now, queues.written), tuple(queues.copies)


class Queues:
    """The queues of copies and collectives while the ops of a trace run in order."""

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
        self.written = 0.0  # when the last update has been offloaded
        self.updates = [op for op in trace.ops if op.phase == "update" and any(update_nbytes(trace, op))]
        self.filled: float | None = None  # when the first windows of the next update have been reloaded

    def run(self, now: float, op: Op) -> float:
        """Run an op, and return when the next one begins."""
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
        """Put a copy into its queue, and return when the next op begins."""
        begin = max(now, self.idle[queue])
        latency = self.machine.network.latency_us if queue == "net" else 0.0
        end = self.ends[value] = self._carry(queue, begin + latency, nbytes)
        self.copies.append(Copy(value, queue, begin, end))
        if queue == "net":
            return now + min(self.machine.network.interference, 1.0) * (end - begin)
        return now + self.machine.link.overhead_us(nbytes)

    def update(self, now: float, op: Op) -> float:
        """Run an update, in windows if some of it is offloaded, and return when the next op begins."""
        back, out = update_nbytes(self.trace, op)
        host_us = host_update_us(self.trace, op, self.machine)
        if not back + out:
            return now + max(op.us, host_us)
        begin = max(now, self.idle["back"]) if self.machine.link.half_duplex else now
        early = staged_share(self.trace, op, self.machine)
        compute, reloaded = (now, 0.0) if self.filled is None else (max(now, self.filled), early)
        end = self._carry("out", self._carry("back", begin, (1 - reloaded) * back), (1 - early) * out)
        now = max(compute + op.us, end, now + host_us)
        self.written = self._carry("out", max(now, end), early * out)
        self.updates.pop(0)
        if self.updates and self.machine.streaming.update_staging:
            following = self.updates[0]
            share = staged_share(self.trace, following, self.machine)
            self.filled = self._carry("back", self.written, share * update_nbytes(self.trace, following)[0])
        return now

    def _carry(self, queue: str, begin: float, nbytes: float) -> float:
        """Carry bytes from `begin` on, and return when they have arrived."""
        end = begin + nbytes / self.rate[queue]
        for name in ("out", "back") if self.machine.link.half_duplex and queue != "net" else (queue,):
            self.idle[name] = max(self.idle[name], end)
        return end
