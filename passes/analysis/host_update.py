"""Which states the host updates where they lie, of those that live far: so many that neither it nor the links are late.

s, 4 MB, far; w and dw, whose it is, far    on the device   8 MB back and 6 MB out
                                            on the host     nothing is copied, 4 MB are stepped
s far; w and dw on the device               on the device   4 MB back and 4 MB out
                                            on the host     2 MB back and 4 MB out, 4 MB are stepped

An update reads, behind each part of the states, the parameters and gradients whose it is.  The host steps beside the
device's windows, so the update takes as long as the longest of the two and of the links.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from itertools import accumulate

from ..ir.machine import Machine
from ..ir.trace import Op, Trace, type_nbytes


@dataclass(frozen=True)
class StateGroup:
    """States that may live far, and the parameters and gradients whose they are."""

    states: Op
    owned: tuple[Op, ...]

    def host_us(self, machine: Machine) -> float:
        """What the host takes to step on them."""
        return self.states.nbytes / machine.streaming.host_update_rate


def state_groups(trace: Trace, update: Op) -> Iterator[StateGroup]:
    """Of what an update reads."""
    reads = [trace.op[read] for read in update.reads]
    begins = [i for i, read in enumerate(reads) if read.fn == "state"]
    for begin, end in zip(begins, [*begins[1:], len(reads)], strict=True):
        if type_nbytes(reads[begin].type) > 0:
            yield StateGroup(reads[begin], tuple(reads[begin + 1 : end]))


def host_updated_states(trace: Trace, machine: Machine, far: Container[str]) -> frozenset[str]:
    """The states that the host updates, if these storages are far."""
    found: set[str] = set()
    for op in trace.ops if machine.streaming.host_update_rate else ():
        if op.phase == "update":
            found.update(_of_update(trace, op, machine, far))
    return frozenset(found)


def device_us(op: Op, machine: Machine) -> float:
    """The time on the links of what is far, if the device updates it."""
    return op_nbytes(op) / machine.link.back + op_nbytes(op) / machine.link.out * _is_written(op)


def host_us(op: Op, machine: Machine) -> float:
    """The time on the links of what is on the device, if the host updates it."""
    return op_nbytes(op) / machine.link.out + op_nbytes(op) / machine.link.back * _is_written(op)


def op_nbytes(op: Op) -> int:
    return max(type_nbytes(op.type), 0)


def _is_written(op: Op) -> bool:
    return op.fn in ("parameter", "state")


def _of_update(trace: Trace, update: Op, machine: Machine, far: Container[str]) -> list[str]:
    """Those that spare the links most for what the host takes, as many as make the update shortest."""
    reads = [trace.op[read] for read in update.reads]
    link = sum(device_us(read, machine) for read in reads if _is_in(read, far))
    spared = [
        (part, _spared_us(part, machine, far)) for part in state_groups(trace, update) if _is_in(part.states, far)
    ]
    useful = sorted((one for one in spared if one[1] > 0), key=lambda one: one[0].host_us(machine) / one[1])
    left = accumulate((us for _, us in useful), lambda us, less: us - less, initial=link)
    steps = accumulate((part.host_us(machine) for part, _ in useful), initial=0.0)
    takes = [max(update.us, *both) for both in zip(left, steps, strict=True)]
    return [part.states.name for part, _ in useful[: takes.index(min(takes))]]


def _spared_us(part: StateGroup, machine: Machine, far: Container[str]) -> float:
    """What the links are spared if the host updates them."""
    own = device_us(part.states, machine)
    return own + sum(device_us(op, machine) if _is_in(op, far) else -host_us(op, machine) for op in part.owned)


def _is_in(op: Op, far: Container[str]) -> bool:
    return any(held in far for held in op.holds)
