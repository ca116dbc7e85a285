"""Forecast the bytes on the device at every op of a trace, and the time of every queue.

    predict(trace, machine) -> Forecast: 18.9 MB at mm_7, 2730 us

Bytes: what is live before an op, what it makes, and its workspace; the staging of copies throughout, if there are any.

Time: compute runs the ops one after the other, casts included.  The queues `out` and `back` of each tier carry copies,
and `net` collectives, each first in, first out.  On a half-duplex link both are one queue.  `free`, `wait`, `reduced`
and `gathered` make compute wait for their copy or collective.  What that takes of compute itself (`Link.overhead_us`,
`Network.interference`) is charged where it begins.

An update that reads from the tier runs in windows, for as long as compute or the link needs, whichever is longer.  With
`Streaming.update_staging` its first windows are reloaded from the end of the update before on, and its last windows are
offloaded while the next ops run.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..ir import ops
from ..ir.arrays import Ints
from ..ir.liveness import Lifetime, Span, lifetimes, spans
from ..ir.machine import Machine
from ..ir.ops import FREE, GATHER, GATHERED, OFFLOAD, REDUCE_SCATTER, REDUCED, RELOAD, WAIT, is_runtime, sent_nbytes
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
    """A copy or a collective: its value, its queue ("out", "back" or "net"), its begin and its end in microseconds, and
    its tier, if that is not the nearest."""

    value: str
    queue: str
    begin: float
    end: float
    tier: str = ""


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

    def __repr__(self) -> str:
        return f"<Forecast: {len(self.trace.ops)} ops, peak {self.peak} bytes, {self.us:.1f} us>"

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
        """Return the bytes that copies are staged in: 0 if there are none.  Those to a tier that is full go farther."""
        links = [tier.link for tier in self.machine.tiers] or [self.machine.link]
        return max(link.staging for link in links) if any(copy.queue != "net" for copy in self.copies) else 0

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


def tier_of(trace: Trace, op: Op) -> str:
    """Return the tier of a copy, or of an input; empty for the nearest."""
    return trace.op[op.reads[0]].tier if op.fn == RELOAD else op.tier


def update_nbytes(trace: Trace, op: Op) -> dict[str, tuple[int, int]]:
    """Map each tier to the bytes that an update reloads from there, and those that it offloads there.

    On the device it reloads all that is offloaded, and offloads what it has written.  On the host it is the other way
    round: it offloads all that is on the device, and reloads what it has written.
    """
    found, on_host = dict[str, tuple[int, int]](), False
    for read in map(trace.op.__getitem__, op.reads):
        on_host = read.on_host if read.fn == "state" else on_host  # with the parameter and the gradient behind it
        offloaded, written = read.offloaded or read.fn == OFFLOAD, read.fn in ("parameter", "state")
        nbytes = max(0, type_nbytes((trace.op[read.reads[0]] if read.fn == OFFLOAD else read).type))
        if offloaded == on_host or not nbytes:
            continue
        back, out = found.get(read.tier, (0, 0))
        more = (nbytes * written, nbytes) if on_host else (nbytes, nbytes * written)
        found[read.tier] = back + more[0], out + more[1]
    return found


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
        self.links = {"": machine.link, **{tier.name: tier.link for tier in machine.behind}}
        self.idle: dict[tuple[str, str], float] = defaultdict(float)  # since when, by queue and tier
        self.ends: dict[str, float] = {}
        self.copies: list[Copy] = []
        self.written = 0.0  # when the last update has been offloaded
        self.updates = [op for op in trace.ops if op.phase == "update" and update_nbytes(trace, op)]
        self.filled: float | None = None  # when the first windows of the next update have been reloaded

    def run(self, now: float, op: Op) -> float:
        """Run an op, and return when the next one begins."""
        machine, trace = self.machine, self.trace
        match op.fn:
            case ops.OFFLOAD:
                return self.copy(now, op, "out", trace.nbytes[trace.op[op.reads[0]].holds[0]])
            case ops.RELOAD:
                return self.copy(now, op, "back", op.nbytes)
            case ops.NARROW:
                return now + trace.nbytes[trace.op[op.reads[0]].holds[0]] / (machine.cast.out or 1.0)
            case ops.WIDEN:
                return now + op.nbytes / (machine.cast.back or 1.0)
            case _ if op.fn in (REDUCE_SCATTER, GATHER):
                return self.exchange(now, op)
            case _ if op.fn in (FREE, WAIT, REDUCED, GATHERED):
                return max(now, self.ends[op.reads[0]])
            case _:
                return self.update(now, op) if op.phase == "update" else now + op.us

    def copy(self, now: float, op: Op, queue: str, nbytes: int) -> float:
        """Begin a copy to a tier or from it, and return when the next op begins."""
        tier = tier_of(self.trace, op)
        begin = max(now, self.idle[queue, tier])
        end = self.ends[op.name] = self._carry(tier, queue, begin, nbytes)
        self.copies.append(Copy(op.name, queue, begin, end, tier))
        return now + self.links[tier].overhead_us(nbytes)

    def exchange(self, now: float, op: Op) -> float:
        """Begin a collective, and return when the next op begins."""
        network, begin = self.machine.network, max(now, self.idle["net", ""])
        took = network.latency_us + sent_nbytes(self.trace, op) / (network.rate or math.inf)
        end = self.ends[op.name] = self.idle["net", ""] = begin + took
        self.copies.append(Copy(op.name, "net", begin, end))
        return now + min(network.interference, 1.0) * (end - begin)

    def update(self, now: float, op: Op) -> float:
        """Run an update, in windows if some of it is offloaded, and return when the next one begins."""
        copied = update_nbytes(self.trace, op)
        host_us = host_update_us(self.trace, op, self.machine)
        if not copied:
            return now + max(op.us, host_us)
        early = staged_share(self.trace, op, self.machine)
        compute, reloaded = (now, 0.0) if self.filled is None else (max(now, self.filled), early)
        end = 0.0
        for tier, (back, out) in copied.items():
            begin = max(now, self.idle["back", tier]) if self.links[tier].half_duplex else now
            arrived = self._carry(tier, "back", begin, (1 - reloaded) * back)
            end = max(end, self._carry(tier, "out", arrived, (1 - early) * out))
        now = max(compute + op.us, end, now + host_us)
        self.written = max(self._carry(tier, "out", max(now, end), early * out) for tier, (_, out) in copied.items())
        self.updates.pop(0)
        if self.updates and self.machine.streaming.update_staging:
            following = self.updates[0]
            share = staged_share(self.trace, following, self.machine)
            reads = update_nbytes(self.trace, following).items()
            self.filled = max(self._carry(tier, "back", self.written, share * back) for tier, (back, _) in reads)
        return now

    def _carry(self, tier: str, queue: str, begin: float, nbytes: float) -> float:
        """Carry bytes from `begin` on, and return when they have arrived."""
        link = self.links[tier]
        end = begin + nbytes / ((link.out if queue == "out" else link.back) or 1.0)
        for name in ("out", "back") if link.half_duplex else (queue,):
            self.idle[name, tier] = max(self.idle[name, tier], end)
        return end
