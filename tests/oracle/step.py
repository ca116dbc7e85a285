"""The facts of a trace for Checkmate: ops that can run again, their readers, and bytes that no decision changes.

a = relu(x)                   again: a, b        readers: a by b
b = mm(a, w)                  wants: 3: {a, b}   until: a 3, b 3
...
g = mm_backward(d, a, b)      at(3): x, w, d, g and the workspace; before(3): x, w, d
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from passes import Lifetime, Op, lifetimes
from passes.analysis.reuse_gaps import ReuseGaps


@dataclass(frozen=True, eq=False)
class Step(ReuseGaps):
    """A trace, cut into stages: one a backward op."""

    @cached_property
    def again(self) -> dict[str, Op]:
        """The ops that make movable storages and can be run again, in forward's order."""
        return {made: self.trace.op[made] for made in self.producer.values() if not self.trace.op[made].once}

    @cached_property
    def readers(self) -> dict[str, list[str]]:
        """The ops that can be run again and read each storage."""
        return {s: [name for name, op in self.again.items() if s in self.movable(op.reads)] for s in self.producer}

    @cached_property
    def wants(self) -> dict[int, set[str]]:
        """The movable storages that each stage's op reads, by the index of the op. An op that reads no such storage
        and needs no bytes is no stage, because values can as well be recomputed before the next op. The first op
        of backward is a stage, because tangents are allocated there."""
        found = {i: self.movable(op.reads) for i, op in enumerate(self.trace.ops) if i >= self.trace.boundary}
        takes = {i for i, op in enumerate(self.trace.ops) if op.makes or op.workspace or i == self.trace.boundary}
        return {i: wanted for i, wanted in found.items() if wanted or i in takes}

    @cached_property
    def until(self) -> dict[str, int]:
        """The last stage at which each storage can be wanted, for itself or to make others again."""
        found = {s: max((i for i, wanted in self.wants.items() if s in wanted), default=-1) for s in self.producer}
        for op in reversed(self.again.values()):
            last = max(found.get(made.name, -1) for made in op.makes)
            found |= {s: max(found[s], last) for s in self.movable(op.reads)}
        return found

    @cached_property
    def pinned(self) -> dict[str, set[int]]:
        """The stages before whose op a backward value (a view) holds each storage: that copy stays."""
        found: dict[str, set[int]] = {s: set() for s in self.producer}
        for i, op in enumerate(self.trace.ops):
            for first, read in ((self.trace.index[read], read) for read in op.reads):
                if first >= self.trace.boundary:
                    for s in self.movable([read]):
                        found[s].update(range(first + 1, i + 1))
        return found

    @cached_property
    def fixed(self) -> tuple[Lifetime, ...]:
        """The lifetimes that no decision changes."""
        return tuple(life for life in lifetimes(self.trace) if life.storage not in self.producer)

    def at(self, i: int) -> int:
        """The fixed bytes while op `i` runs, with its workspace."""
        return sum(life.nbytes for life in self.fixed if life.first <= i <= life.last) + self.trace.ops[i].workspace

    def before(self, i: int) -> int:
        """The fixed bytes between backward op `i` and the op before it."""
        there = (life for life in self.fixed if life.first < i or self.trace.op[life.producer].is_input)
        return sum(life.nbytes for life in there if life.last >= i)

    def movable(self, values: Iterable[str]) -> set[str]:
        """The movable storages that `values` hold."""
        return {s for value in values for s in self.trace.op[value].holds if s in self.producer}
