"""The forward storages of a trace, and when forward last and backward first has a use for each.

    a = relu(x)                 a: left after 1 (the mm), needed by relu_backward, 5
    b = mm(a, w)
    ...                         between the two nobody reads a: its gap
    g = relu_backward(d, a)

This is the whole of what can be decided: outside of its gap a storage has to be there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..ir.liveness import Lifetime, last_reads
from ..ir.machine import cast_type
from ..ir.ops import NARROW, RELOAD, WIDEN, value_of
from ..ir.trace import Op, Trace, type_nbytes
from .streamable import StreamableStates

# The ops that make a copy of what is sent away, and what stands behind its name in theirs.
COPIES = (NARROW, RELOAD, WIDEN)


@dataclass(frozen=True, eq=False)
class ReuseGaps:
    """What the planner knows of a trace; derived once."""

    trace: Trace

    @cached_property
    def index(self) -> dict[str, int]:
        return {op.name: i for i, op in enumerate(self.trace.ops)}

    @cached_property
    def producer(self) -> dict[str, str]:
        """The forward op that makes each storage; inputs and what the step hands out are not among them."""
        handed = {storage for _, value in self.trace.outputs for storage in self.trace.op[value].holds}
        forward = (op for op in self.trace.ops if op.phase == "forward" and not op.is_input)
        return {made.name: op.name for op in forward for made in op.makes if made.name not in handed and made.nbytes}

    @cached_property
    def holds(self) -> dict[str, tuple[str, ...]]:
        """For each forward value the movable storages that it holds; values without any are left out."""
        forward = (op for op in self.trace.ops if op.phase == "forward" and not op.is_input)
        found = {op.name: tuple(s for s in op.holds if s in self.producer) for op in forward}
        return {value: storages for value, storages in found.items() if storages}

    @cached_property
    def values(self) -> dict[str, tuple[str, ...]]:
        """The forward values that hold each movable storage."""
        found: dict[str, list[str]] = {}
        for value, storages in self.holds.items():
            for storage in storages:
                found.setdefault(storage, []).append(value)
        return {storage: tuple(values) for storage, values in found.items()}

    @cached_property
    def reads(self) -> dict[int, tuple[str, ...]]:
        """For each backward op (by index) the movable forward values that it reads."""
        backward = range(self.trace.boundary, len(self.trace.ops))
        found = {i: tuple(dict.fromkeys(r for r in self.trace.ops[i].reads if r in self.holds)) for i in backward}
        return {i: values for i, values in found.items() if values}

    @cached_property
    def uses(self) -> dict[str, tuple[int, ...]]:
        """The backward ops (by index) that read each storage, for those that backward reads."""
        found: dict[str, list[int]] = {}
        for i, values in self.reads.items():
            for storage in {s for value in values for s in self.holds[value]}:
                found.setdefault(storage, []).append(i)
        return {storage: tuple(indices) for storage, indices in found.items()}

    @cached_property
    def last_forward_use(self) -> dict[str, int]:
        """The last forward op (by index) that makes or reads each storage."""
        last = last_reads(self.trace.ops[: self.trace.boundary])
        return {storage: last[storage] for storage in self.producer}

    @cached_property
    def whole_value(self) -> dict[str, str]:
        """The value that is all of a storage and nothing else: what can be sent away."""
        found: dict[str, str] = {}
        for value, storages in self.holds.items():
            op = self.trace.op[value]
            # A view of what may not run again could not be made again itself.
            own = bool(op.makes) or op.fn == "getitem"
            if own and len(op.holds) == 1 and type_nbytes(op.type) == self.trace.nbytes[storages[0]]:
                found.setdefault(storages[0], value)
        return found

    def wire_nbytes(self, storage: str, wire: str) -> int:
        """The bytes of a storage that has a root, once it is cast to `wire`; 0 if it may not be, as where a view takes
        its bytes for another type."""
        views = (self.trace.op[value] for value in self.values[storage])
        whole = [part for op in views if len(op.holds) == 1 for part in op.type.replace("], ", "]\n").split("\n")]
        type = cast_type(self.trace.op[self.whole_value[storage]].type, wire)
        return type_nbytes(type) if type and all(cast_type(part, wire) for part in whole) else 0

    def origin(self, life: Lifetime, made: Op) -> str:
        """The captured trace's storage of which a life in a planned one, made by `made`, is a copy; or itself."""
        if made.recomputes:
            return made.recomputes + life.storage.removeprefix(made.name)
        if made.fn in COPIES:
            value = value_of(made.name)
            return self.streamable.views[value] if value in self.streamable.views else self.holds[value][0]
        return life.storage

    @cached_property
    def streamable(self) -> StreamableStates:
        """What may live in the far tier."""
        return StreamableStates(self.trace)

    @cached_property
    def getitems(self) -> dict[str, tuple[str, ...]]:
        """For each op that makes several storages the values that take one of them out."""
        found: dict[str, list[str]] = {}
        for value in self.holds:
            op = self.trace.op[value]
            if op.fn == "getitem":
                found.setdefault(op.reads[0], []).append(value)
        return {value: tuple(parts) for value, parts in found.items()}

    @cached_property
    def begins(self) -> tuple[float, ...]:
        """When each op would begin if nothing were moved, in microseconds; one entry more than ops."""
        begins = [0.0]
        for op in self.trace.ops:
            begins.append(begins[-1] + op.us)
        return tuple(begins)
