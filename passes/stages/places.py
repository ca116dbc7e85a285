"""The place of each op: a stage is an interval of places, in forward and in backward.

    0  a = mm(x, w)        5  gw = mm(ga, x)     place 0, like a
    1  b = relu(a)         4  ga = relu_backward(d, b)    place 1
    2  c = sum(b)          3  d = expand(t)      place 2

A forward op is at its own index.  A backward op is at the forward op that it is the derivative of: the earliest last
use of a value that it reads.  Places fall along backward, so that backward of a stage is one run of the captured order,
and gradients flow from later stages to earlier ones only.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ..analysis.chain_sections import opposite_ops
from ..analysis.step_graph import step_graph
from ..ir.arrays import Ints
from ..ir.trace import Op, Trace

if TYPE_CHECKING:
    import networkx as nx


@dataclass(frozen=True, eq=False)
class Places:
    """The places of a trace of forward and backward, without an update.

    Attributes:
        sums: ops that add up gradients of one parameter. Stages that share it do so once a step, not in each backward;
            a sum whose parts one stage makes stays there.
        owners: the parameter of each gradient. A stage that makes a gradient, or a part of it, has its parameter.
        modules: sets of inputs. Where ops write to one of a set, all that read one of them stay in one stage.
    """

    trace: Trace
    sums: frozenset[str] = field(default=frozenset())
    owners: Mapping[str, str] = field(default_factory=dict)
    modules: Collection[Collection[str]] = ()

    @cached_property
    def graph(self) -> nx.DiGraph:
        return step_graph(self.trace)

    @cached_property
    def producer(self) -> dict[str, int]:
        """Map each storage to the op (by index) that makes it."""
        return {made.name: i for i, op in enumerate(self.trace.ops) for made in op.makes}

    @cached_property
    def reads(self) -> tuple[frozenset[str], ...]:
        """Return the storages that each op reads."""
        return tuple(frozenset(self.trace.held_by(op.reads)) for op in self.trace.ops)

    @cached_property
    def place(self) -> Ints:
        """Return the place of each op.  That of an input says nothing, as each stage that reads it has it."""
        trace, boundary = self.trace, self.trace.boundary
        place = np.arange(len(trace.ops))
        reads = {i: self.reads[i] for i in range(boundary, len(trace.ops)) if not trace.ops[i].is_input}
        made = {s: i for s, i in self.producer.items() if i < boundary and not trace.ops[i].is_input}
        for i, opposite in opposite_ops(reads, made, self._last_use, boundary - 1).items():
            place[i] = opposite
        return place

    @cached_property
    def _last_use(self) -> dict[str, int]:
        """Map each storage to the last forward op that reads it; inputs only if one op alone computes with them."""
        uses: dict[str, list[int]] = {}
        for i, op in enumerate(self.trace.ops[: self.trace.boundary]):
            if not op.is_input:
                for storage in self.reads[i]:
                    uses.setdefault(storage, []).append(i)
        return {s: found[-1] for s, found in uses.items() if not self._is_input(s) or self._is_used_once(found)}

    def _is_input(self, storage: str) -> bool:
        return self.trace.ops[self.producer[storage]].is_input

    def _is_used_once(self, uses: list[int]) -> bool:
        return sum(computes(self.trace.ops[i]) for i in uses) == 1

    @cached_property
    def uses(self) -> dict[str, tuple[list[int], list[int]]]:
        """Map each storage to the places of the forward ops and of the backward ops that compute with it."""
        uses: dict[str, tuple[list[int], list[int]]] = {}
        for i, op in enumerate(self.trace.ops):
            if computes(op):
                for storage in self.reads[i]:
                    uses.setdefault(storage, ([], []))[i >= self.trace.boundary].append(int(self.place[i]))
        return uses

    @cached_property
    def cuts(self) -> tuple[int, ...]:
        """Return the forward ops before which the step may be cut: those that compute, but for a first one."""
        ops = [i for i, op in enumerate(self.trace.ops[: self.trace.boundary]) if computes(op)]
        return tuple(i for i in ops[1:] if not any(first < i <= last for first, last in self._together))

    @property
    def _together(self) -> Iterator[tuple[int, int]]:
        """Yield the first and the last place of each run of ops that stay in one stage."""
        yield from self._written
        yield from self._gradients
        yield from self._modules

    @cached_property
    def _gradients(self) -> list[tuple[int, int]]:
        """Return, for each part of a gradient, its place and the nearest one that reads the parameter."""
        index, spans = {op.name: i for i, op in enumerate(self.trace.ops)}, []
        for value, parameter in self.owners.items():
            (storage,) = self.trace.op[parameter].holds
            reads = [*itertools.chain(*self.uses.get(storage, ((), ())))]
            for part in self.parts(value) if reads else ():
                made = int(self.place[index[self.maker[part]]])
                nearest = min(reads, key=lambda read: abs(read - made))
                spans.append((min(made, nearest), max(made, nearest)))
        return spans

    @cached_property
    def _written(self) -> list[tuple[int, int]]:
        """Return, for each op that writes in place, the first op that uses what it writes, and itself.

        What is written to an input reaches the stage of that op alone, so the last use of the input stands there too.
        """
        spans = []
        for i, op in enumerate(self.trace.ops[: self.trace.boundary]):
            if _writes(op):
                uses = [j for j in range(i) if set(op.holds) & (self.reads[j] | set(self.trace.ops[j].holds))]
                first = min((j for j in uses if not self.trace.ops[j].is_input), default=i)
                inputs = (self.uses[storage] for storage in op.holds if self._is_input(storage))
                spans.append((first, max([i, *itertools.chain(*(places for each in inputs for places in each))])))
        return spans

    @property
    def _modules(self) -> Iterator[tuple[int, int]]:
        """Yield the first and the last place that use an input of a module, if ops write to one of its inputs.

        Another call, as evaluation is, may read together what this one reads apart.
        """
        written = {held for op in self.trace.ops[: self.trace.boundary] if _writes(op) for held in op.holds}
        for names in self.modules:
            storages = {held for name in names for held in self.trace.op[name].holds}
            places = [*itertools.chain(*(each for held in storages for each in self.uses.get(held, ())))]
            if places and not written.isdisjoint(storages):
                yield min(places), max(places)

    @cached_property
    def maker(self) -> dict[str, str]:
        """Map each value to the op that computes it, or the storages that it views."""
        maker: dict[str, str] = {}
        for op in self.trace.ops:
            maker[op.name] = op.name if computes(op) or not op.reads else maker[op.reads[0]]
        return maker

    @cached_property
    def sendable(self) -> frozenset[str]:
        """Return what can be sent as it is: the value of an op that computes, or an item of it if these are several."""
        ops = (op for op in self.trace.ops if not op.is_input)
        return frozenset(op.name for op in ops if computes(op) or self._is_item(op))

    def _is_item(self, op: Op) -> bool:
        return any(len(self.trace.op[read].holds) > len(op.holds) for read in op.reads)

    def parts(self, value: str) -> Iterator[str]:
        """Yield the values that a sum adds up, the newest first; of other values, the value itself."""
        if value in self.sums:
            for read in reversed(self.trace.op[value].reads):
                yield from self.parts(read)
        else:
            yield value

    def terms(self, value: str) -> Iterator[str]:
        """Yield a value, and if it is a sum, the sums and parts that it adds up."""
        yield value
        if value in self.sums:
            for read in self.trace.op[value].reads:
                yield from self.terms(read)

    def parts_of(self, own: Set[str], value: str) -> Iterator[str]:
        """Yield the largest parts of a sum that these ops alone make, the newest first."""
        makers = {self.maker[part] for part in self.parts(value)}
        if makers <= own:
            yield value
        elif value in self.sums and not makers.isdisjoint(own):
            for read in reversed(self.trace.op[value].reads):
                yield from self.parts_of(own, read)


def by_module(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the names of parameters and buffers by the paths of the modules that have them."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(name.rpartition(".")[0], []).append(name)
    return found


def _writes(op: Op) -> bool:
    """Return True for an op that writes in place."""
    return not op.makes and computes(op)


def computes(op: Op) -> bool:
    """Return False for inputs, and for views and items of another value, which cost nothing."""
    return not op.is_input and (bool(op.makes) or op.once)
