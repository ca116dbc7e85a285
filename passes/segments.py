"""Let neighbouring lines be one.

    y = add(x, r)                                      seg = memgraph.segment(x, r, w, b)
    n = native_layer_norm(y, w, b)            ->       y = getitem(seg)
    n_0 = getitem(n)                                   n_0 = getitem(seg)
    v = view(n_0)                                      v = view(n_0)

A segment reads values from before it, and gives those of its values that others want: one for each storage.  Views that
others want are made again behind it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from .ir.machine import Machine
from .ir.ops import SEGMENT, is_runtime
from .ir.trace import Op, Storage, Trace
from .simulate.forecast import predict

LEAST, MOST = 2, 64  # ops that compute, in one segment


@dataclass(frozen=True, slots=True)
class Segment:
    """Neighbouring ops by their names, the values from before them that they read, and those that others want of them;
    `views` are those of its ops that others want, and which nobody has to compute."""

    name: str
    ops: tuple[str, ...]
    reads: tuple[str, ...]
    outputs: tuple[str, ...]
    views: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Price:
    """What a segment takes: microseconds, and bytes that it allocates and frees meanwhile."""

    us: float
    workspace: int = 0


def find_segments(trace: Trace, fusible: Callable[[Op], bool]) -> tuple[Segment, ...]:
    """The longest segments of ops that are `fusible`, and of views."""
    readers = _readers(trace)
    torn = {op.reads[0] for op in trace.ops if op.fn == "getitem"}  # values that are several
    found: list[Segment] = []
    for mine, lines in groupby(trace.ops, lambda op: _place(op, fusible)):
        if mine is not None:
            found += _cut(list(lines), readers, torn)
    return tuple(found)


def fuse_segments(trace: Trace, chosen: Iterable[Segment], prices: Mapping[str, Price]) -> Trace:
    """The step in which each chosen segment is one line, at its price."""
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
    trace: Trace, machine: Machine, found: Sequence[Segment], prices: Mapping[str, Price]
) -> tuple[Segment, ...]:
    """Those that are faster than their ops, and whose line is within the budget.

    At other lines the step holds with segments what it holds without.
    """
    faster = [each for each in found if prices[each.name].us < sum(trace.op[name].us for name in each.ops)]
    forecast = predict(fuse_segments(trace, faster, prices), machine)
    lines = zip(forecast.trace.ops, forecast.total, strict=True)
    over = {op.name for op, nbytes in lines if nbytes > machine.budget}
    return tuple(each for each in faster if each.name not in over)


def spread_segment_times(trace: Trace, found: Iterable[Segment], prices: Mapping[str, Price]) -> Trace:
    """The step in which the ops of a segment that is faster than they are take its time, each by its part."""
    us: dict[str, float] = {}
    for segment in found:
        alone = sum(trace.op[name].us for name in segment.ops)
        if prices[segment.name].us < alone:
            us |= {name: trace.op[name].us * prices[segment.name].us / alone for name in segment.ops}
    return replace(trace, ops=tuple(replace(op, us=round(us.get(op.name, op.us), 3)) for op in trace.ops))


def _place(op: Op, fusible: Callable[[Op], bool]) -> tuple[str, int, int] | None:
    """What the ops of one segment have in common; None for an op that is in none."""
    if op.is_input or op.phase == "update" or is_runtime(op.fn):
        return None
    if op.once or op.draws or not (is_view(op) or fusible(op)):
        return None
    return op.phase, op.slice, op.microbatch


def is_view(op: Op) -> bool:
    """Whether it only gives what is there another form."""
    return not op.makes and bool(op.holds)


def _cut(lines: list[Op], readers: Mapping[str, Sequence[str]], torn: set[str]) -> Iterator[Segment]:
    """The segments of a run of lines: none too long, and no value that is several half inside."""
    begin = 0
    while begin < len(lines):
        run = _first(lines[begin:])
        end = begin + len(run)
        while (bad := _half(run, readers, torn)) is not None:
            end, run = begin + bad + 1, run[:bad]
        if sum(not is_view(op) for op in run) >= LEAST and (segment := _segment(run, readers, torn)).outputs:
            yield segment
        begin = end


def _first(lines: list[Op]) -> list[Op]:
    """The first lines, with as many ops that compute as a segment may have."""
    computing = [i for i, op in enumerate(lines) if not is_view(op)]
    return lines[: computing[MOST]] if len(computing) > MOST else lines


def _half(run: list[Op], readers: Mapping[str, Sequence[str]], torn: set[str]) -> int | None:
    """The first op of a run that makes a value that is several for others, or takes its part of another's."""
    names = {op.name for op in run}
    for i, op in enumerate(run):
        taken = op.fn == "getitem" and op.reads[0] not in names
        if taken or (op.name in torn and not names.issuperset(readers[op.name])):
            return i
    return None


def _segment(run: list[Op], readers: Mapping[str, Sequence[str]], torn: set[str]) -> Segment:
    names = {op.name for op in run}
    outside = [op for op in run if not names.issuperset(readers[op.name])]
    made = {storage.name for op in run for storage in op.makes}
    wanted = dict.fromkeys(held for op in outside for held in op.holds if held in made)
    bearer: dict[str, str] = {}  # of each storage, the first value that is all of it
    for op in run:
        if op.name not in torn and (op.makes or op.fn == "getitem"):
            for held in op.holds:
                bearer.setdefault(held, op.name)
    gives = tuple(bearer[held] for held in wanted)
    views = _with_sources(run, [op for op in outside if op.name not in gives], set(gives))
    ops = _needed(run, gives)
    reads = dict.fromkeys(read for op in run if op.name in ops for read in op.reads if read not in names)
    return Segment(f"{run[0].name}_segment", tuple(op.name for op in run), tuple(reads), gives, views)


def _with_sources(run: list[Op], views: list[Op], gives: set[str]) -> tuple[str, ...]:
    """The views, and the views of the run that these are made of."""
    wanted = {op.name for op in views}
    for op in reversed(run):
        if op.name in wanted:
            wanted |= {read for read in op.reads if read not in gives}
    return tuple(op.name for op in run if op.name in wanted)


def _needed(run: list[Op], gives: Iterable[str]) -> set[str]:
    """The ops that have to run for what is given."""
    wanted = set(gives)
    for op in reversed(run):
        if op.name in wanted:
            wanted |= set(op.reads)
    return wanted


def _lines(trace: Trace, segment: Segment, price: Price, renamed: dict[str, str]) -> Iterator[Op]:
    """What stands in a segment's place; `renamed` learns the names that its storages have now."""
    ops = [trace.op[name] for name in segment.outputs]
    one = trace.op[segment.ops[0]]
    made = tuple(Storage(f"{segment.name}.{i}", trace.nbytes[op.holds[0]]) for i, op in enumerate(ops))
    renamed |= {op.holds[0]: storage.name for op, storage in zip(ops, made, strict=True)}
    yield Op(
        segment.name, SEGMENT, segment.reads, made, tuple(storage.name for storage in made), one.phase,
        price.us, price.workspace, microbatch=one.microbatch, slice=one.slice, type=", ".join(op.type for op in ops),
        where=one.where,
    )  # fmt: skip
    for op, storage in zip(ops, made, strict=True):
        yield Op(
            op.name, "getitem", (segment.name,), holds=(storage.name,), phase=op.phase, microbatch=op.microbatch,
            slice=op.slice, type=op.type, where=op.where,
        )  # fmt: skip
    yield from (_holding(trace.op[name], renamed) for name in segment.views)


def _holding(op: Op, renamed: Mapping[str, str]) -> Op:
    return replace(op, holds=tuple(renamed.get(held, held) for held in op.holds))


def _readers(trace: Trace) -> Mapping[str, Sequence[str]]:
    """Who reads each value; the caller is one of them, by the name of "return"."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for op in trace.ops:
        for read in op.reads:
            found[read].append(op.name)
    for _, value in trace.outputs:
        found[value].append("return")
    return found
