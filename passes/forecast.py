"""What lies on the device at every op of a trace, and what every queue does when.

    predict(trace, machine) -> Forecast: 18.9 MB at mm_7, 2730 us

Bytes: what is alive before an op, what it makes, and its workspace; the copies' staging throughout, if there are
copies. Time: four queues.  Compute runs the ops one after the other, casts among them; `out` and `back` carry copies,
`net` what ranks exchange, each first in, first out.  `free`, `wait`, `reduced` and `gathered` hold compute until theirs
has ended.  What a copy takes of compute itself (`Machine.toll_us`, `strain`) is charged where it begins.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from .exchanges import BEGINS, ENDS, sent_nbytes
from .gathers import GATHERED, GATHERS
from .lifetime import Life, lifetimes
from .machine import Machine
from .trace import Op, Trace, type_nbytes

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
OFFLOAD = "memgraph.offload.default"


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
    """A trace's bytes and time.  Arrays have one entry an op."""

    trace: Trace
    lives: tuple[Life, ...]
    by_kind: dict[str, Bytes]
    begins: tuple[float, ...]  # microseconds at which each op begins
    us: float
    copies: tuple[Copy, ...]

    @cached_property
    def total(self) -> Bytes:
        return np.add.reduce(list(self.by_kind.values()), axis=0, dtype=np.int64)

    @cached_property
    def at(self) -> int:
        """The index of the first op at the peak."""
        return int(np.argmax(self.total)) if len(self.total) else 0

    @property
    def peak(self) -> int:
        return int(self.total[self.at]) if len(self.total) else 0

    @cached_property
    def retained(self) -> int:
        """The peak if backward lets nothing go that forward had saved for it, or goes through the same a second time,
        when its gradients come beside those that are there."""
        turn, kept = self.trace.boundary, np.zeros(len(self.total) + 1, dtype=np.int64)
        for life in self.lives:
            if life.first < turn <= life.last:
                kept[life.last + 1] += life.nbytes
        gradients = int(self.by_kind["gradient"].max(initial=0))
        return max(int((self.total + np.cumsum(kept)[:-1]).max(initial=0)), self.peak + gradients)

    def alive(self, index: int) -> tuple[Life, ...]:
        """What is on the device while op `index` runs, the largest first."""
        there = (life for life in self.lives if life.first <= index <= life.last)
        return tuple(sorted(there, key=lambda life: -life.nbytes))

    def __str__(self) -> str:
        where = self.trace.ops[self.at].name if self.trace.ops else "nothing"
        return f"{self.peak} bytes at {where}, {self.us:.0f} us"


def predict(trace: Trace, machine: Machine) -> Forecast:
    """The one function that knows what is on the device when, and what overlaps."""
    lives = lifetimes(trace)
    size = len(trace.ops)
    change = {kind: np.zeros(size + 1, dtype=np.int64) for kind in KINDS}
    for life in lives:
        change[life.kind][life.first] += life.nbytes
        change[life.kind][life.last + 1] -= life.nbytes
    by_kind = {kind: np.cumsum(steps[:-1]) for kind, steps in change.items()}
    by_kind["workspace"] = np.array([_workspace(trace, op, machine) for op in trace.ops], dtype=np.int64)
    if any(op.fn in ("memgraph.offload.default", "memgraph.reload.default") for op in trace.ops):
        by_kind["staging"] = np.full(size, machine.staging, dtype=np.int64)
    begins, us, copies = _clock(trace, machine)
    return Forecast(trace, lives, by_kind, begins, us, copies)


def far_reads(trace: Trace, op: Op) -> tuple[Op, ...]:
    """What an op of the update reads where it lies in the far tier: inputs, and tickets of what has left."""
    found = (trace.op[read] for read in op.reads) if op.phase == "update" else ()
    return tuple(read for read in found if read.far or read.fn == OFFLOAD)


def _workspace(trace: Trace, op: Op, machine: Machine) -> int:
    return machine.window if op.phase == "update" and far_reads(trace, op) else op.workspace


def update_nbytes(trace: Trace, op: Op) -> tuple[int, int]:
    """What comes for an update, and what goes: all that is far, there and back but for gradients; for what is updated
    on the host, all that is not."""
    come, go, hosted = 0, 0, False
    for read in map(trace.op.__getitem__, op.reads):
        hosted = read.hosted if read.fn == "state" else hosted  # and so is what stands behind it
        far, written = read.far or read.fn == OFFLOAD, read.fn in ("parameter", "state")
        nbytes = max(0, type_nbytes((trace.op[read.reads[0]] if read.fn == OFFLOAD else read).type))
        if far and not hosted:
            come, go = come + nbytes, go + nbytes * written
        elif hosted and not far:
            come, go = come + nbytes * written, go + nbytes
    return come, go


def _update_us(trace: Trace, op: Op, machine: Machine) -> float:
    """Copies go on while the update computes, and so does the host."""
    come, go = update_nbytes(trace, op)
    return max(op.us, come / (machine.back or 1.0) + go / (machine.out or 1.0), stepped_us(trace, op, machine))


def stepped_us(trace: Trace, op: Op, machine: Machine) -> float:
    """What the host takes for the states of an update that it steps on."""
    there = sum(type_nbytes(trace.op[read].type) for read in op.reads if trace.op[read].hosted)
    return there / (machine.stepping or 1.0)


def _clock(trace: Trace, machine: Machine) -> tuple[tuple[float, ...], float, tuple[Copy, ...]]:
    """When each op begins, when the last ends, and the copies."""
    now, idle = 0.0, {"out": 0.0, "back": 0.0, "net": 0.0}
    rate = {"out": machine.out or 1.0, "back": machine.back or 1.0, "net": machine.net or math.inf}
    latency = {"net": machine.latency}
    ends: dict[str, float] = {}
    begins: list[float] = []
    copies: list[Copy] = []

    def send(value: str, queue: str, nbytes: int) -> float:
        """Put a copy into its queue; when compute goes on."""
        begin = max(now, idle[queue])
        idle[queue] = ends[value] = begin + latency.get(queue, 0.0) + nbytes / rate[queue]
        copies.append(Copy(value, queue, begin, ends[value]))
        if queue == "net":
            return now + min(machine.strain, 1.0) * (idle[queue] - begin)
        return now + machine.toll_us(nbytes)

    for op in trace.ops:
        begins.append(now)
        match op.fn:
            case "memgraph.offload.default":
                now = send(op.name, "out", trace.nbytes[trace.op[op.reads[0]].holds[0]])
            case "memgraph.reload.default":
                now = send(op.name, "back", op.nbytes)
            case "memgraph.narrow.default":
                now += trace.nbytes[trace.op[op.reads[0]].holds[0]] / (machine.narrow or 1.0)
            case "memgraph.widen.default":
                now += op.nbytes / (machine.widen or 1.0)
            case _ if op.fn in (BEGINS, GATHERS):
                now = send(op.name, "net", sent_nbytes(trace, op))
            case "memgraph.free.default" | "memgraph.wait.default":
                now = max(now, ends[op.reads[0]])
            case _ if op.fn in (ENDS, GATHERED):
                now = max(now, ends[op.reads[0]])
            case _ if op.phase == "update":
                now += _update_us(trace, op, machine)
            case _:
                now += op.us
    return tuple(begins), now, tuple(copies)
