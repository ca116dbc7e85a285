"""Reorder a step of micro-batches: run each section for all micro-batches before the next section.

    a_2 = mm(x_2, v)  # microbatch 2                  a_2 = mm(x_2, v)  # microbatch 2 | section 1
    b_2 = mm(a_2, w)  # microbatch 2                  a_1 = mm(x_1, v)  # microbatch 1 | section 1
    a_1 = mm(x_1, v)  # microbatch 1          ->      b_2 = mm(a_2, w)  # microbatch 2 | section 2
    b_1 = mm(a_1, w)  # microbatch 1                  b_1 = mm(a_1, w)  # microbatch 1 | section 2

So streamed parameters are reloaded once for all micro-batches, and not once for each.  In return, what crosses from one
section to the next is live for all micro-batches.  Backward runs the sections in reverse.

A section has an op that reads a parameter, and begins where few bytes cross.  Its parameters together are no larger
than the largest of the step, which has to be on the device in any case.  Among such cuts, the one is taken that costs
the least time to move what crosses, and to wait for parameters.  The cut does not depend on the budget, so a plan for
one budget is also one for every larger budget.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ..analysis.chain_sections import Sections, narrowest_sections
from ..analysis.reuse_gaps import ReuseGaps
from ..ir.machine import Machine
from ..ir.ops import GATHER, REDUCE_SCATTER
from ..ir.trace import PHASES, Op, Trace
from .comm_order import place_collectives
from .early_updates import update_early


def orders(trace: Trace, machine: Machine) -> tuple[Trace, ...]:
    """Return the orders of a step in which plans are searched for, each if nothing fits in those before.

    Section by section, parameters that are streamed are reloaded least often.  Collectives that end at once need the
    fewest bytes, whatever overlap was measured: so the smallest budget does not depend on it.
    """
    found: list[Trace] = []
    for order in (order_by_section(trace, machine), trace):
        for each in (order, place_collectives(order, at_once=True)):
            found += [each] * (each not in found)
    return tuple(found)


def order_by_section(trace: Trace, machine: Machine) -> Trace:
    """Return the step section by section; unchanged if it has no micro-batches, or one section is enough."""
    numbers = tuple(sorted({op.microbatch for op in trace.ops} - {0}))
    parts = [_Microbatch(trace, number, numbers) for number in numbers]
    if len(parts) < 2 or len({len(part.marks) for part in parts}) > 1:
        return trace
    marks = _cuts(parts, machine)
    if not marks:
        return trace
    number = {name: i for part in parts for name, i in part.sections(marks).items()}
    return _in_order(trace, number, len(marks) + 1, not machine.network.overlaps_comm)


def order_like(trace: Trace, like: Trace) -> Trace:
    """Return the step in the order and the sections of `like`, which was reordered; unchanged if it has other ops."""
    if trace.op.keys() != like.op.keys() or not any(op.section or op.fn in (REDUCE_SCATTER, GATHER) for op in like.ops):
        return trace
    return replace(trace, ops=tuple(replace(trace.op[op.name], section=op.section) for op in like.ops))


@dataclass(frozen=True, eq=False)
class _Microbatch:
    """The ops of one micro-batch, as a step."""

    whole: Trace
    number: int
    numbers: tuple[int, ...]  # of all micro-batches

    @cached_property
    def trace(self) -> Trace:
        ops = [op for op in self.whole.ops if op.is_input or op.microbatch == self.number]
        own = {op.name for op in ops}
        made = {storage.name for op in ops for storage in op.makes}
        return Trace(tuple(_alone(op, own, made) for op in ops))

    @cached_property
    def chain(self) -> Sections:
        return Sections(ReuseGaps(self.trace), len(self.trace.ops))

    @cached_property
    def marks(self) -> tuple[int, ...]:
        """Return the forward ops (by index) that are the first to read a parameter."""
        marks, seen = list[int](), set[str]()
        for i, storages in self.read.items():
            if i < self.trace.boundary and not storages <= seen:
                marks.append(i)
            seen |= storages
        return tuple(marks)

    @cached_property
    def read(self) -> dict[int, set[str]]:
        """Map each op (by index) that reads parameters to their storages; a view reads none."""
        owned = {storage.name for op in self.trace.ops if op.fn == "parameter" for storage in op.makes}
        ops = self.trace.ops
        read = {i: self.trace.held_by(op.reads) & owned for i, op in enumerate(ops)}
        return {i: storages for i, storages in read.items() if storages and not storages & set(ops[i].holds)}

    @cached_property
    def places(self) -> tuple[int, ...]:
        """Return the narrowest place (a forward op, by index) before each mark but the first."""
        return narrowest_sections(self.chain.crossing_nbytes, self.marks)

    def sections(self, marks: Sequence[int]) -> dict[str, int]:
        """Map each op to its section, from 1, if sections begin before these marks."""
        cuts = np.array([self.places[mark - 1] for mark in marks])
        ops, sections, level = self.trace.ops, dict[str, int](), self.trace.boundary - 1
        last = {storage: i for i, storages in self.read.items() if i < self.trace.boundary for storage in storages}
        for i, op in enumerate(ops):
            if op.is_input:
                continue
            if i >= self.trace.boundary:
                opposite = self.chain.level.get(i, max((last.get(s, -1) for s in self.read.get(i, ())), default=-1))
                level = min(level, opposite) if opposite >= 0 else level
            sections[op.name] = int(np.searchsorted(cuts, min(i, level), side="right")) + 1
        return sections


def _alone(op: Op, own: set[str], made: set[str]) -> Op:
    """Return an op without reads and storages of other micro-batches."""
    reads = tuple(name for name in op.reads if name in own)
    return replace(op, reads=reads, holds=tuple(name for name in op.holds if name in made))


def _cuts(parts: Sequence[_Microbatch], machine: Machine) -> tuple[int, ...]:
    """Return the marks at which sections begin, but for the first, that cost least."""
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


def _us(part: _Microbatch, span: tuple[int, int], nbytes: int, machine: Machine) -> float:
    """Return what a section costs a micro-batch: moving what crosses, and waiting for parameters."""
    begins, rate = part.chain.gaps.begins, machine.link.back or math.inf
    boundary = int(part.chain.crossing_nbytes[span[0]]) if span[0] else 0
    moved = boundary / (machine.link.out or math.inf) + boundary / rate
    return moved + max(0.0, nbytes / rate / len(part.numbers) - (begins[span[1]] - begins[span[0]]))


def _ends(origin: Sequence[int]) -> tuple[int, ...]:
    """Follow the cuts back from the last place."""
    ends = [origin[-1]]
    while ends[-1]:
        ends.append(origin[ends[-1]])
    return tuple(ends[-2::-1])


def _in_order(trace: Trace, sections: Mapping[str, int], count: int, at_once: bool) -> Trace:
    """Order ops by section: forward from the first to the last, backward in reverse, each behind what it reads."""
    rank = dict[str, int]()
    for op in trace.ops:
        own = sections.get(op.name, 0)
        if own and op.phase == "backward":
            own = 2 * count + 1 - own
        rank[op.name] = max([own, *(rank[read] for read in op.reads)])
    ops: list[Op] = []
    for phase in PHASES:
        of_phase = [replace(op, section=sections.get(op.name, 0)) for op in trace.ops if op.phase == phase]
        ops += sorted(of_phase, key=lambda op: -1 if op.is_input else rank[op.name])
    return update_early(place_collectives(replace(trace, ops=tuple(ops)), at_once))
