"""Choose the offloaded states that the host updates: as many as make the update shortest.

s, 4 MB, offloaded; its w and dw as well         update on the device   8 MB back and 6 MB out
                                                 update on the host     no copies, 4 MB updated
s offloaded; w and dw on the device              update on the device   4 MB back and 4 MB out
                                                 update on the host     2 MB back and 4 MB out, 4 MB updated

An update reads groups of states, each followed by its parameters and gradients.  The host updates its groups beside the
device, so the update takes as long as the slowest of host, device and link.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from itertools import accumulate

from ..ir.machine import Machine
from ..ir.trace import Op, Trace, type_nbytes


@dataclass(frozen=True)
class StateGroup:
    """States of an update, with their parameters and gradients."""

    states: Op
    owned: tuple[Op, ...]

    def host_us(self, machine: Machine) -> float:
        """Return the microseconds of their update on the host."""
        return self.states.nbytes / machine.streaming.host_update_rate


def state_groups(trace: Trace, update: Op) -> Iterator[StateGroup]:
    """Yield the groups that an update reads."""
    reads = [trace.op[read] for read in update.reads]
    begins = [i for i, read in enumerate(reads) if read.fn == "state"]
    for begin, end in zip(begins, [*begins[1:], len(reads)], strict=True):
        if type_nbytes(reads[begin].type) > 0:
            yield StateGroup(reads[begin], tuple(reads[begin + 1 : end]))


def host_updated_states(trace: Trace, machine: Machine, offloaded: Container[str]) -> frozenset[str]:
    """Return the states that the host updates, if these storages are offloaded."""
    states: set[str] = set()
    for op in trace.ops if machine.streaming.host_update_rate else ():
        if op.phase == "update":
            states.update(_states_of_update(trace, op, machine, offloaded))
    return frozenset(states)


def device_us(op: Op, machine: Machine) -> float:
    """Return the link time of an offloaded value that the device updates."""
    return op_nbytes(op) / machine.link.back + op_nbytes(op) / machine.link.out * _is_written(op)


def host_us(op: Op, machine: Machine) -> float:
    """Return the link time of a value on the device that the host updates."""
    return op_nbytes(op) / machine.link.out + op_nbytes(op) / machine.link.back * _is_written(op)


def op_nbytes(op: Op) -> int:
    return max(type_nbytes(op.type), 0)


def _is_written(op: Op) -> bool:
    return op.fn in ("parameter", "state")


def _states_of_update(trace: Trace, update: Op, machine: Machine, offloaded: Container[str]) -> list[str]:
    """Return the states with the best ratio of link time to host time, as many as make the update shortest."""
    reads = [trace.op[read] for read in update.reads]
    link = sum(device_us(read, machine) for read in reads if _is_in(read, offloaded))
    groups = [
        (group, _saved_us(group, machine, offloaded))
        for group in state_groups(trace, update)
        if _is_in(group.states, offloaded)
    ]
    useful = sorted(
        ((group, us) for group, us in groups if us > 0), key=lambda pair: pair[0].host_us(machine) / pair[1]
    )
    left = accumulate((us for _, us in useful), lambda us, less: us - less, initial=link)
    steps = accumulate((group.host_us(machine) for group, _ in useful), initial=0.0)
    takes = [max(update.us, *both) for both in zip(left, steps, strict=True)]
    return [group.states.name for group, _ in useful[: takes.index(min(takes))]]


def _saved_us(group: StateGroup, machine: Machine, offloaded: Container[str]) -> float:
    """Return the link time that is saved if the host updates a group."""
    own = device_us(group.states, machine)
    return own + sum(device_us(op, machine) if _is_in(op, offloaded) else -host_us(op, machine) for op in group.owned)


def _is_in(op: Op, offloaded: Container[str]) -> bool:
    return any(held in offloaded for held in op.holds)
