"""A step in micro-batches, part by part -> the same step slice by slice: each slice runs for all parts before the next.

    a_2 = mm(x_2, v)  # microbatch 2                  a_2 = mm(x_2, v)  # microbatch 2 | slice 1
    b_2 = mm(a_2, w)  # microbatch 2                  a_1 = mm(x_1, v)  # microbatch 1 | slice 1
    a_1 = mm(x_1, v)  # microbatch 1          ->      b_2 = mm(a_2, w)  # microbatch 2 | slice 2
    b_1 = mm(a_1, w)  # microbatch 1                  b_1 = mm(a_1, w)  # microbatch 1 | slice 2

So parameters that live far come once for all parts, and not once for each; for that what lies between two slices lies
there for all parts.  Backward goes through the slices the other way.

A slice holds an op that reads a parameter, and begins where little crosses.  Its parameters are together no larger than
the largest of the step, which has to lie there in any case.  Of the ways to cut so that is taken whose boundaries take
the least time to move and whose parameters keep compute waiting least.  It does not depend on the budget, so that a
plan for one budget is one for every larger one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ..analysis.chain_slices import Slices, narrowest_slices
from ..analysis.reuse_gaps import ReuseGaps
from ..ir.machine import Machine
from ..ir.ops import GATHER, REDUCE_SCATTER
from ..ir.trace import PHASES, Op, Trace
from .comm_order import place_collectives
from .early_updates import update_early


def slice_microbatches(trace: Trace, machine: Machine) -> Trace:
    """The step slice by slice; as it is, if it has no parts, or one slice is enough."""
    numbers = tuple(sorted({op.microbatch for op in trace.ops} - {0}))
    parts = [_Part(trace, number, numbers) for number in numbers]
    if len(parts) < 2 or len({len(part.marks) for part in parts}) > 1:
        return trace
    marks = _cuts(parts, machine)
    if not marks:
        return trace
    number = {name: i for part in parts for name, i in part.slices(marks).items()}
    return _in_order(trace, number, len(marks) + 1, not machine.network.overlaps_comm)


def reslice_microbatches(trace: Trace, like: Trace) -> Trace:
    """The step in the order, and in the slices, of one of the same ops, if that has any or exchanges; as it is, if it
    is another step."""
    if trace.op.keys() != like.op.keys() or not any(op.slice or op.fn in (REDUCE_SCATTER, GATHER) for op in like.ops):
        return trace
    return replace(trace, ops=tuple(replace(trace.op[op.name], slice=op.slice) for op in like.ops))


@dataclass(frozen=True, eq=False)
class _Part:
    """The ops that work on one micro-batch, as a step of their own."""

    whole: Trace
    number: int
    numbers: tuple[int, ...]  # of all parts

    @cached_property
    def trace(self) -> Trace:
        ops = [op for op in self.whole.ops if op.is_input or op.microbatch == self.number]
        mine = {op.name for op in ops}
        made = {storage.name for op in ops for storage in op.makes}
        return Trace(tuple(_alone(op, mine, made) for op in ops))

    @cached_property
    def chain(self) -> Slices:
        return Slices(ReuseGaps(self.trace), len(self.trace.ops))

    @cached_property
    def marks(self) -> tuple[int, ...]:
        """The forward ops (by index) that read a parameter that no op before them did."""
        found, seen = list[int](), set[str]()
        for i, storages in self.read.items():
            if i < self.trace.boundary and not storages <= seen:
                found.append(i)
            seen |= storages
        return tuple(found)

    @cached_property
    def read(self) -> dict[int, set[str]]:
        """For each op (by index) that reads parameters their storages; a view reads none."""
        owned = {storage.name for op in self.trace.ops if op.fn == "parameter" for storage in op.makes}
        ops, known = self.trace.ops, self.trace.op
        found = {i: {s for read in op.reads for s in known[read].holds} & owned for i, op in enumerate(ops)}
        return {i: storages for i, storages in found.items() if storages and not storages & set(ops[i].holds)}

    @cached_property
    def places(self) -> tuple[int, ...]:
        """The narrowest place (a forward op, by index) before each mark but the first."""
        return narrowest_slices(self.chain.crossing_nbytes, self.marks)

    def slices(self, marks: Sequence[int]) -> dict[str, int]:
        """The slice of each op, from 1, if slices begin before these marks."""
        cuts = np.array([self.places[mark - 1] for mark in marks])
        ops, found, level = self.trace.ops, dict[str, int](), self.trace.boundary - 1
        last = {storage: i for i, storages in self.read.items() if i < self.trace.boundary for storage in storages}
        for i, op in enumerate(ops):
            if op.is_input:
                continue
            if i >= self.trace.boundary:
                opposite = self.chain.level.get(i, max((last.get(s, -1) for s in self.read.get(i, ())), default=-1))
                level = min(level, opposite) if opposite >= 0 else level
            found[op.name] = int(np.searchsorted(cuts, min(i, level), side="right")) + 1
        return found


def _alone(op: Op, mine: set[str], made: set[str]) -> Op:
    """An op without what other parts have to do with it."""
    reads = tuple(name for name in op.reads if name in mine)
    return replace(op, reads=reads, holds=tuple(name for name in op.holds if name in made))


def _cuts(parts: Sequence[_Part], machine: Machine) -> tuple[int, ...]:
    """The marks before which a slice begins, but for the first: the least costly way to cut."""
    part, count = parts[0], len(parts[0].marks)
    most = max((made.nbytes for op in part.trace.ops if op.fn == "parameter" for made in op.makes), default=0)
    at = [0, *part.places, part.trace.boundary]
    read = [{s for i in range(a, b) for s in part.read.get(i, ())} for a, b in itertools.pairwise(at)]
    least, origin = [0.0] + [math.inf] * count, [0] * (count + 1)
    for end in range(1, count + 1):
        here = set[str]()
        for start in range(end - 1, -1, -1):
            here |= read[start]
            nbytes = sum(part.trace.nbytes[storage] for storage in here)
            if nbytes > most and start < end - 1:
                break
            us = least[start] + _us(part, (at[start], at[end]), nbytes, machine) * len(parts)
            if us <= least[end]:
                least[end], origin[end] = us, start
    return _ends(origin)


def _us(part: _Part, span: tuple[int, int], nbytes: int, machine: Machine) -> float:
    """What a slice costs a part: its boundary on the links, and what of its parameters comes too late."""
    begins, rate = part.chain.gaps.begins, machine.link.back or math.inf
    boundary = int(part.chain.crossing_nbytes[span[0]]) if span[0] else 0
    moved = boundary / (machine.link.out or math.inf) + boundary / rate
    return moved + max(0.0, nbytes / rate / len(part.numbers) - (begins[span[1]] - begins[span[0]]))


def _ends(origin: Sequence[int]) -> tuple[int, ...]:
    """The ways back from the last place."""
    found = [origin[-1]]
    while found[-1]:
        found.append(origin[found[-1]])
    return tuple(found[-2::-1])


def _in_order(trace: Trace, slices: Mapping[str, int], count: int, at_once: bool) -> Trace:
    """The ops by slice: forward from the first to the last, backward the other way, each not before what it reads."""
    rank = dict[str, int]()
    for op in trace.ops:
        own = slices.get(op.name, 0)
        if own and op.phase == "backward":
            own = 2 * count + 1 - own
        rank[op.name] = max([own, *(rank[read] for read in op.reads)])
    ops: list[Op] = []
    for phase in PHASES:
        mine = [replace(op, slice=slices.get(op.name, 0)) for op in trace.ops if op.phase == phase]
        ops += sorted(mine, key=lambda op: -1 if op.is_input else rank[op.name])
    return update_early(place_collectives(replace(trace, ops=tuple(ops)), at_once))
