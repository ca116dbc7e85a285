"""What of a trace's state may live in the far tier: inputs, and the gradients that the step hands out.

w = parameter()                  inputs: w
t = t(w)                         views: w and t, of w
y = mm(x, t)                     visits: 2 reads t
...
g = mm(x_t, d)                   gradients: g, which ended at the last op that reads it
return gradient g
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from ..ir.liveness import last_reads
from ..ir.ops import gathered_by
from ..ir.trace import Trace, type_nbytes


@dataclass(frozen=True, eq=False)
class StreamableStates:
    """What the planner knows of it; derived once."""

    trace: Trace

    @cached_property
    def values(self) -> dict[str, str]:
        """The value that is all of each storage that may live far."""
        return self.inputs | {storage: value for storage, value in self.gradients.items() if storage not in self.inputs}

    @cached_property
    def inputs(self) -> dict[str, str]:
        """The inputs that may live in the far tier, by their storage: what is dense, and neither handed out nor
        gathered."""
        alone = {op.name: op.holds for op in self.trace.ops if len(op.holds) == 1}
        mixed = {held for op in self.trace.ops if op.name not in alone for held in op.holds}
        handed = {
            storage
            for kind, value in self.trace.outputs
            if kind != "gradient"
            for storage in self.trace.op[value].holds
        }
        handed |= {held for storages in gathered_by(self.trace).values() for held in storages}
        # To a gradient that no op reads autograd adds by itself, so it stays.
        read = {value for op in self.trace.ops if op.phase != "update" for value in op.reads}
        return {
            op.holds[0]: op.name
            for op in self.trace.ops
            if op.fn in ("parameter", "gradient", "state")
            and type_nbytes(op.type) == op.nbytes > 0
            and not {op.holds[0]} & (mixed | handed)
            and (op.fn != "gradient" or op.name in read)
        }

    @cached_property
    def views(self) -> dict[str, str]:
        """The storage of every value, the input itself included, that forward knows of what may live far."""
        early = (op for op in self.trace.ops if op.is_input or op.phase == "forward")
        return {op.name: op.holds[0] for op in early if op.holds and op.holds[0] in self.inputs}

    @cached_property
    def reads(self) -> dict[int, tuple[str, ...]]:
        """For each op (by index) before the update the values that it reads of what may live far."""
        found = {
            i: tuple(dict.fromkeys(read for read in op.reads if read in self.views))
            for i, op in enumerate(self.trace.ops)
            if op.phase != "update"
        }
        return {i: values for i, values in found.items() if values}

    @cached_property
    def gradients(self) -> dict[str, str]:
        """The gradients that the step hands out and that may leave before it ends, by their storage."""
        handed = [value for _, value in self.trace.outputs]
        counts = Counter(storage for value in set(handed) for storage in self.trace.op[value].holds)
        found = {}
        for kind, value in self.trace.outputs:
            op = self.trace.op[value]
            whole = len(op.holds) == 1 and type_nbytes(op.type) == self.trace.nbytes[op.holds[0]] > 0
            if (
                kind == "gradient"
                and op.phase == "backward"
                and whole
                and counts[op.holds[0]] == handed.count(value) == 1
            ):
                found[op.holds[0]] = value
        return found

    @cached_property
    def last_use(self) -> dict[str, int]:
        """The last op (by index) before the update that makes or reads each gradient that may leave."""
        places = [i for i, op in enumerate(self.trace.ops) if op.phase != "update"]
        last = last_reads([self.trace.ops[i] for i in places])
        return {storage: places[last[storage]] for storage in self.gradients}

    def offload_deadline(self, gradient: str) -> int:
        """The last op (by index) before the update of a gradient; before the last update, if it has none."""
        ops = self.trace.ops
        return self.updates.get(gradient, len(ops) - (ops[-1].phase == "update")) - 1

    @cached_property
    def updates(self) -> dict[str, int]:
        """The first update (by index) that reads each value."""
        late = [(i, op) for i, op in enumerate(self.trace.ops) if op.phase == "update"]
        return {read: i for i, op in reversed(late) for read in op.reads}
