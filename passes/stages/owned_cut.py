"""Where the stages of another call begin, once each rank has its parameters: an op runs where these are.

    owners {w1: 0, w2: 1}        0  a = mm(x, w1)
                                 1  b = relu(a)
                                 2  c = mm(b, w2)        ->    stage 1 begins at 1 or at 2

Between two such ops a stage begins at the op at which it begins in the first call, or else as early as it can.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..ir.trace import Op
from .places import Places, computes


def begins_by_owners(
    places: Places, owners: Mapping[str, Sequence[int]], stages: int, first: Sequence[Op]
) -> tuple[int, ...]:
    """Return the place at which each stage begins.

    Args:
        owners: the stages that have the value of an input; those of an input that is not named have it all.
        first: the op at which each stage begins in the first call.

    Raises:
        ValueError: an op needs what only earlier stages have, or a stage has no ops.
    """
    stage_of = _earliest_stages(places, owners)
    begins = [0]
    for k in range(1, stages):
        behind = max((i for i, stage in stage_of.items() if stage < k), default=begins[-1])
        last = min((i for i, stage in stage_of.items() if stage >= k), default=places.trace.boundary)
        allowed = [place for place in places.cuts if max(behind, begins[-1]) < place <= last]
        if not allowed:
            raise ValueError(f"stage {k} of {stages} has no ops in this call, which has others than the first")
        same = (place for place in allowed if _is_same(places.trace.ops[place], first[k]))
        begins.append(next(same, allowed[0]))
    return tuple(begins)


def _earliest_stages(places: Places, owners: Mapping[str, Sequence[int]]) -> dict[int, int]:
    """Return the earliest stage for each place whose ops need an owned input, behind the places before it."""
    trace, current, found = places.trace, 0, {}
    for i, storages in enumerate(_read_at(places)):
        for name in sorted({trace.ops[places.producer[storage]].name for storage in storages} & owners.keys()):
            later = [stage for stage in owners[name] if stage >= current]
            if not later:
                op = trace.ops[i]
                raise ValueError(
                    f"{op.name} at {op.where} needs {name}, which stage {max(owners[name])} has, and runs behind "
                    f"ops of stage {current}; calls differ too much for one cut"
                )
            current = found[i] = min(later)
    return found


def _read_at(places: Places) -> list[set[str]]:
    """Return the storages that the ops at each place read, those of backward included."""
    trace = places.trace
    found: list[set[str]] = [set() for _ in range(trace.boundary)]
    for op, place, reads in zip(trace.ops, places.place, places.reads, strict=True):
        if computes(op):
            found[int(place)] |= reads
    return found


def _is_same(op: Op, other: Op) -> bool:
    return (op.fn, op.where) == (other.fn, other.where)
