"""Fuse neighbouring ops of a trace into segments, which are compiled as one.

    y = add(x, r)                                      seg = memgraph.segment(x, r, w, b)
    n = native_layer_norm(y, w, b)            ->       y = getitem(seg)
    n_0 = getitem(n)                                   n_0 = getitem(seg)
    v = view(n_0)                                      v = view(n_0)

A segment reads values from before it, and returns those of its values that other ops read: one for each storage.  Views
that other ops read are recreated behind it.

A region is a segment of all ops between two that stay outside.  It frees what it reads for the last time while it runs,
so its price has the peak of that run: a workspace may be negative.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

from .analysis.step_graph import sources, step_graph
from .ir.liveness import spans
from .ir.machine import Machine
from .ir.ops import REGION, SEGMENT, is_runtime
from .ir.trace import Op, Storage, Trace
from .simulate.forecast import predict

if TYPE_CHECKING:
    import networkx as nx

LEAST, MOST = 2, 64  # ops that compute, in one segment


@dataclass(frozen=True, slots=True)
class Segment:
    """Neighbouring ops by name, the values from before them that they read, and those that other ops read.

    `views` are its ops that other ops read and that compute nothing.  `frees` are the values among `reads` whose
    storages no op behind it reads.
    """

    name: str
    ops: tuple[str, ...]
    reads: tuple[str, ...]
    outputs: tuple[str, ...]
    views: tuple[str, ...]
    frees: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Price:
    """The microseconds of a segment, and the bytes at its peak beyond its results and all that was live before it."""

    us: float
    workspace: int = 0


def find_segments(trace: Trace, fusible: Callable[[Op], bool], most: int = MOST) -> tuple[Segment, ...]:
    """Return the longest segments of views and ops that are `fusible`, with at most `most` ops that compute."""
    graph = step_graph(trace)
    tuples = {op.reads[0] for op in trace.ops if op.fn == "getitem"}  # values with items
    segments: list[Segment] = []
    for key, lines in groupby(trace.ops, lambda op: _place(op, fusible)):
        if key is not None:
            segments += _cut(list(lines), graph, tuples, most)
    return tuple(segments)


def find_regions(trace: Trace, compilable: Callable[[Op], bool]) -> tuple[Segment, ...]:
    """Return the longest segments of views and ops that are `compilable`, and what each frees."""
    return _regions(trace, find_segments(trace, compilable, len(trace.ops)))


def split_region(trace: Trace, region: Segment, least: int) -> tuple[Segment, ...]:
    """Return a region in two parts or more, or none if they would have fewer than `least` ops that compute."""
    lines = [trace.op[name] for name in region.ops]
    most = -(-sum(not is_view(op) for op in lines) // 2)
    tuples = {op.reads[0] for op in trace.ops if op.fn == "getitem"}
    return _regions(trace, _cut(lines, step_graph(trace), tuples, most)) if most >= least else ()


def fuse_segments(trace: Trace, chosen: Iterable[Segment], prices: Mapping[str, Price]) -> Trace:
    """Return the step in which each chosen segment is one op, at its price."""
    first = {segment.ops[0]: segment for segment in chosen}
    inside = {name for segment in first.values() for name in segment.ops}
    renamed: dict[str, str] = {}
    ops: list[Op] = []
    for op in trace.ops:
        if op.name in first:
            ops += _lines(trace, first[op.name], prices[first[op.name].name], renamed)
        elif op.name not in inside:
            ops.append(_holding(op, renamed))
    return replace(trace, ops=tuple(ops))


def affordable_segments(
    trace: Trace, machine: Machine, segments: Sequence[Segment], prices: Mapping[str, Price]
) -> tuple[Segment, ...]:
    """Return the segments that are faster than their ops, and whose op fits the budget.

    At other ops the step needs with segments what it needs without.
    """
    faster = [each for each in segments if prices[each.name].us < sum(trace.op[name].us for name in each.ops)]
    over = over_budget(trace, machine, faster, prices)
    return tuple(each for each in faster if each.name not in over)


def over_budget(
    trace: Trace, machine: Machine, segments: Sequence[Segment], prices: Mapping[str, Price]
) -> dict[str, int]:
    """Return the bytes beyond the budget of each segment that does not fit it, by name."""
    forecast = predict(fuse_segments(trace, segments, prices), machine)
    lines = zip(forecast.trace.ops, forecast.total, strict=True)
    names = {each.name for each in segments}
    return {op.name: int(n) - machine.budget for op, n in lines if op.name in names and n > machine.budget}


def faster_regions(
    trace: Trace, regions: Iterable[Segment], segments: Sequence[Segment], prices: Mapping[str, Price]
) -> tuple[Segment, ...]:
    """Return the regions that are faster than their ops in `segments`."""
    fused = fuse_segments(trace, segments, prices)
    us = {op.name: op.us for op in fused.ops}
    whole = {op.name: each.name for each in segments for op in map(trace.op.__getitem__, each.ops)}

    def apart(region: Segment) -> float:
        return sum(us.get(name, 0.0) for name in dict.fromkeys(whole.get(name, name) for name in region.ops))

    return tuple(region for region in regions if prices[region.name].us < apart(region))


def outside_of(regions: Iterable[Segment], segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """Return the segments without an op in a region."""
    inside = {name for region in regions for name in region.ops}
    return tuple(each for each in segments if inside.isdisjoint(each.ops))


def spread_segment_times(trace: Trace, segments: Iterable[Segment], prices: Mapping[str, Price]) -> Trace:
    """Return the step in which the ops of each segment share its time, if it is faster than they are."""
    us: dict[str, float] = {}
    for segment in segments:
        alone = sum(trace.op[name].us for name in segment.ops)
        if prices[segment.name].us < alone:
            us |= {name: trace.op[name].us * prices[segment.name].us / alone for name in segment.ops}
    return replace(trace, ops=tuple(replace(op, us=round(us.get(op.name, op.us), 3)) for op in trace.ops))


def _place(op: Op, fusible: Callable[[Op], bool]) -> tuple[str, int, int] | None:
    """Return what the ops of one segment have in common; None for an op that is in none."""
    if op.is_input or op.phase == "update" or is_runtime(op.fn):
        return None
    if op.once or op.draws or not (is_view(op) or fusible(op)):
        return None
    return op.phase, op.section, op.microbatch


def is_view(op: Op) -> bool:
    """Return True if an op only views storages of others."""
    return not op.makes and bool(op.holds)


def _regions(trace: Trace, segments: Iterable[Segment]) -> tuple[Segment, ...]:
    returned = trace.held_by(value for _, value in trace.outputs)
    ends = [(made.name, first, last) for op, made, first, last in spans(trace) if not op.is_input]
    ends = [end for end in ends if end[0] not in returned]
    return tuple(replace(each, name=f"{each.ops[0]}{REGION}", frees=_freed(trace, each, ends)) for each in segments)


def _freed(trace: Trace, region: Segment, ends: Iterable[tuple[str, int, int]]) -> tuple[str, ...]:
    """Return what a region reads whose storages, from `ends` of (name, first op, last op), end inside it."""
    begin, end = trace.index[region.ops[0]], trace.index[region.ops[-1]]
    freed = {name for name, first, last in ends if first < begin <= last <= end}
    return tuple(read for read in region.reads if trace.op[read].holds and freed.issuperset(trace.op[read].holds))


def _cut(lines: list[Op], graph: nx.DiGraph, tuples: set[str], most: int) -> Iterator[Segment]:
    """Yield the segments of a run of lines: none is too long, and none separates a tuple from its items."""
    begin = 0
    while begin < len(lines):
        run = _first(lines[begin:], most)
        end = begin + len(run)
        while (bad := _half(run, graph, tuples)) is not None:
            end, run = begin + bad + 1, run[:bad]
        if sum(not is_view(op) for op in run) >= LEAST and (segment := _segment(run, graph, tuples)).outputs:
            yield segment
        begin = end


def _first(lines: list[Op], most: int) -> list[Op]:
    """Return the first lines, with as many ops that compute as a segment may have."""
    computing = [i for i, op in enumerate(lines) if not is_view(op)]
    return lines[: computing[most]] if len(computing) > most else lines


def _half(run: list[Op], graph: nx.DiGraph, tuples: set[str]) -> int | None:
    """Return the first op whose items are taken out behind the run, or that takes an item of an op before it."""
    names = {op.name for op in run}
    for i, op in enumerate(run):
        taken = op.fn == "getitem" and op.reads[0] not in names
        if taken or (op.name in tuples and not names.issuperset(graph[op.name])):
            return i
    return None


def _segment(run: list[Op], graph: nx.DiGraph, tuples: set[str]) -> Segment:
    names = {op.name for op in run}
    outside = [op for op in run if not names.issuperset(graph[op.name])]
    made = {storage.name for op in run for storage in op.makes}
    read_later = dict.fromkeys(held for op in outside for held in op.holds if held in made)
    whole: dict[str, str] = {}  # of each storage, the first value that is all of it
    for op in run:
        if op.name not in tuples and (op.makes or op.fn == "getitem"):
            for held in op.holds:
                whole.setdefault(held, op.name)
    outputs = tuple(whole[held] for held in read_later)
    shown = sources(graph, [op.name for op in outside if op.name not in outputs], names - set(outputs))
    views = tuple(op.name for op in run if op.name in shown)  # with the views that they are made of
    ops = sources(graph, outputs, names)
    reads = dict.fromkeys(read for op in run if op.name in ops for read in op.reads if read not in names)
    return Segment(f"{run[0].name}_segment", tuple(op.name for op in run), tuple(reads), outputs, views)


def _lines(trace: Trace, segment: Segment, price: Price, renamed: dict[str, str]) -> Iterator[Op]:
    """Yield the ops in the place of a segment, and add the new names of its storages to `renamed`."""
    ops = [trace.op[name] for name in segment.outputs]
    first = trace.op[segment.ops[0]]
    made = tuple(Storage(f"{segment.name}.{i}", trace.nbytes[op.holds[0]]) for i, op in enumerate(ops))
    renamed |= {op.holds[0]: storage.name for op, storage in zip(ops, made, strict=True)}
    yield Op(
        segment.name, SEGMENT, segment.reads, made, tuple(storage.name for storage in made), first.phase,
        price.us, price.workspace, microbatch=first.microbatch, section=first.section,
        type=", ".join(op.type for op in ops), where=first.where,
    )  # fmt: skip
    for op, storage in zip(ops, made, strict=True):
        yield Op(
            op.name, "getitem", (segment.name,), holds=(storage.name,), phase=op.phase, microbatch=op.microbatch,
            section=op.section, type=op.type, where=op.where,
        )  # fmt: skip
    yield from (_holding(trace.op[name], renamed) for name in segment.views)


def _holding(op: Op, renamed: Mapping[str, str]) -> Op:
    return replace(op, holds=tuple(renamed.get(held, held) for held in op.holds))
