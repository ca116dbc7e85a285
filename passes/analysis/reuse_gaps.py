"""The forward storages of a trace, and the gap between the last use of each in forward and its first in backward.

    a = relu(x)                 a: last used in forward by mm, 1, and in backward by relu_backward, 5
    b = mm(a, w)
    ...                         in between no op reads a: its gap
    g = relu_backward(d, a)

Plans decide about gaps only: outside of its gap a storage has to be on the device.

The state of a trace that may be offloaded: inputs, and the gradients that the step returns.

w = parameter()                  inputs: w
t = t(w)                         views: w and t, of w
y = mm(x, t)                     reads: 2 reads t
...
g = mm(x_t, d)                   gradients: g, with the op that uses it last
return gradient g
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from ..ir.liveness import Lifetime, last_reads
from ..ir.machine import cast_type
from ..ir.ops import NARROW, RELOAD, WIDEN, gathered_by, value_of
from ..ir.trace import Op, Trace, type_nbytes

COPIES = (NARROW, RELOAD, WIDEN)  # ops that make a copy of an offloaded value


@dataclass(frozen=True, eq=False)
class ReuseGaps:
    """Facts about a trace, each derived once."""

    trace: Trace

    @cached_property
    def producer(self) -> dict[str, str]:
        """Map each movable storage to the forward op that makes it: neither an input nor an output."""
        returned = self.trace.held_by(value for _, value in self.trace.outputs)
        forward = (op for op in self.trace.ops if op.phase == "forward" and not op.is_input)
        return {made.name: op.name for op in forward for made in op.makes if made.name not in returned and made.nbytes}

    @cached_property
    def holds(self) -> dict[str, tuple[str, ...]]:
        """Map each forward value to the movable storages that it holds, if it holds any."""
        forward = (op for op in self.trace.ops if op.phase == "forward" and not op.is_input)
        result = {op.name: tuple(s for s in op.holds if s in self.producer) for op in forward}
        return {value: storages for value, storages in result.items() if storages}

    @cached_property
    def values(self) -> dict[str, tuple[str, ...]]:
        """Map each movable storage to the forward values that hold it."""
        result: dict[str, list[str]] = {}
        for value, storages in self.holds.items():
            for storage in storages:
                result.setdefault(storage, []).append(value)
        return {storage: tuple(values) for storage, values in result.items()}

    @cached_property
    def reads(self) -> dict[int, tuple[str, ...]]:
        """Map each backward op (by index) to the movable forward values that it reads."""
        backward = range(self.trace.boundary, len(self.trace.ops))
        result = {i: tuple(dict.fromkeys(r for r in self.trace.ops[i].reads if r in self.holds)) for i in backward}
        return {i: values for i, values in result.items() if values}

    @cached_property
    def uses(self) -> dict[str, tuple[int, ...]]:
        """Map each storage to the backward ops (by index) that read it, if any do."""
        result: dict[str, list[int]] = {}
        for i, values in self.reads.items():
            for storage in {s for value in values for s in self.holds[value]}:
                result.setdefault(storage, []).append(i)
        return {storage: tuple(indices) for storage, indices in result.items()}

    @cached_property
    def last_forward_use(self) -> dict[str, int]:
        """Map each storage to the last forward op (by index) that makes or reads it."""
        last = last_reads(self.trace.ops[: self.trace.boundary])
        return {storage: last[storage] for storage in self.producer}

    @cached_property
    def whole_value(self) -> dict[str, str]:
        """Map a storage to the value that is all of it and nothing else, which can be offloaded."""
        result: dict[str, str] = {}
        for value, storages in self.holds.items():
            op = self.trace.op[value]
            # A view can only be recomputed if its source can.
            own = bool(op.makes) or op.fn == "getitem"
            if own and len(op.holds) == 1 and type_nbytes(op.type) == self.trace.nbytes[storages[0]]:
                result.setdefault(storages[0], value)
        return result

    def wire_nbytes(self, storage: str, wire: str) -> int:
        """Return the bytes of a storage cast to `wire`; 0 if it may not be, as if a view has another dtype."""
        views = (self.trace.op[value] for value in self.values[storage])
        types = [each for op in views if len(op.holds) == 1 for each in op.type.replace("], ", "]\n").split("\n")]
        type = cast_type(self.trace.op[self.whole_value[storage]].type, wire)
        return type_nbytes(type) if type and all(cast_type(each, wire) for each in types) else 0

    def origin(self, life: Lifetime, made: Op) -> str:
        """Return the captured storage that one of a planned trace, made by `made`, is a copy of; or itself."""
        if made.recomputes:
            return made.recomputes + life.storage.removeprefix(made.name)
        if made.fn in COPIES:
            value = value_of(made.name)
            return self.streamable.views[value] if value in self.streamable.views else self.holds[value][0]
        return life.storage

    @cached_property
    def streamable(self) -> StreamableStates:
        """Return the state that may be offloaded."""
        return StreamableStates(self.trace)

    @cached_property
    def getitems(self) -> dict[str, tuple[str, ...]]:
        """Map each op that returns a tuple to the values that take an item out."""
        result: dict[str, list[str]] = {}
        for value in self.holds:
            op = self.trace.op[value]
            if op.fn == "getitem":
                result.setdefault(op.reads[0], []).append(value)
        return {value: tuple(items) for value, items in result.items()}

    @cached_property
    def begins(self) -> tuple[float, ...]:
        """Return when each op begins without a plan, in microseconds, and when the last ends."""
        begins = [0.0]
        for op in self.trace.ops:
            begins.append(begins[-1] + op.us)
        return tuple(begins)


@dataclass(frozen=True, eq=False)
class StreamableStates:
    """Facts about that state, each derived once."""

    trace: Trace

    @cached_property
    def values(self) -> dict[str, str]:
        """Map each storage that may be offloaded to the value that is all of it."""
        return self.inputs | {storage: value for storage, value in self.gradients.items() if storage not in self.inputs}

    @cached_property
    def inputs(self) -> dict[str, str]:
        """Map storages to the inputs that may be offloaded: dense, and neither returned nor gathered."""
        alone = {op.name: op.holds for op in self.trace.ops if len(op.holds) == 1}
        mixed = {held for op in self.trace.ops if op.name not in alone for held in op.holds}
        returned = self.trace.held_by(value for kind, value in self.trace.outputs if kind != "gradient")
        returned |= {held for storages in gathered_by(self.trace).values() for held in storages}
        # Autograd itself adds to a gradient that no op reads, so that gradient stays.
        read = {value for op in self.trace.ops if op.phase != "update" for value in op.reads}
        return {
            op.holds[0]: op.name
            for op in self.trace.ops
            if op.fn in ("parameter", "gradient", "state")
            and type_nbytes(op.type) == op.nbytes > 0
            and not {op.holds[0]} & (mixed | returned)
            and (op.fn != "gradient" or op.name in read)
        }

    @cached_property
    def views(self) -> dict[str, str]:
        """Map each input that may be offloaded, and its views in forward, to their storage."""
        early = (op for op in self.trace.ops if op.is_input or op.phase == "forward")
        return {op.name: op.holds[0] for op in early if op.holds and op.holds[0] in self.inputs}

    @cached_property
    def reads(self) -> dict[int, tuple[str, ...]]:
        """Map each op (by index) before the update to the values that it reads of inputs that may be offloaded."""
        result = {
            i: tuple(dict.fromkeys(read for read in op.reads if read in self.views))
            for i, op in enumerate(self.trace.ops)
            if op.phase != "update"
        }
        return {i: values for i, values in result.items() if values}

    @cached_property
    def gradients(self) -> dict[str, str]:
        """Map storages to the returned gradients that may be offloaded before the step ends."""
        returned = [value for _, value in self.trace.outputs]
        counts = Counter(storage for value in set(returned) for storage in self.trace.op[value].holds)
        result = {}
        for kind, value in self.trace.outputs:
            op = self.trace.op[value]
            whole = len(op.holds) == 1 and type_nbytes(op.type) == self.trace.nbytes[op.holds[0]] > 0
            if (
                kind == "gradient"
                and op.phase == "backward"
                and whole
                and counts[op.holds[0]] == returned.count(value) == 1
            ):
                result[op.holds[0]] = value
        return result

    @cached_property
    def last_use(self) -> dict[str, int]:
        """Map each of these gradients to the last op (by index) before the update that makes or reads it."""
        places = [i for i, op in enumerate(self.trace.ops) if op.phase != "update"]
        last = last_reads([self.trace.ops[i] for i in places])
        return {storage: places[last[storage]] for storage in self.gradients}

    def offload_deadline(self, gradient: str) -> int:
        """Return the last op (by index) before the update of a gradient, or before the last update, if it has none."""
        ops = self.trace.ops
        return self.updates.get(gradient, len(ops) - (ops[-1].phase == "update")) - 1

    @cached_property
    def updates(self) -> dict[str, int]:
        """Map each value to the first update (by index) that reads it."""
        late = [(i, op) for i, op in enumerate(self.trace.ops) if op.phase == "update"]
        return {read: i for i, op in reversed(late) for read in op.reads}
