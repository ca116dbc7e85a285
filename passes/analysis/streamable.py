"""The state of a trace that may be offloaded: inputs, and the gradients that the step returns.

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

from ..ir.liveness import last_reads
from ..ir.ops import gathered_by
from ..ir.trace import Trace, type_nbytes


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
