"""Carry out a slice: run the ops of its chain in parts of the rows.

    a = mm(x, w)                          g__parts = empty_strided()
    b = relu(a)                           a__p1 = mm(x__p1, w);  b__p1 = relu(a__p1);  g__p1 = mm(b__p1, v);  ...
    g = mm(b, v)              ->          s__parts = mm(b_t__p1, g__p1)
    s = mm(b_t, g)                        a__p2 = ...;  addmm_(s__parts, b_t__p2, g__p2);  ...
                                          g = alias(g__parts);  s = alias(s__parts)

So a and b are never whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ..ir.trace import Op, Trace
from .blocks import Block, blocks_of
from .hoist import SCALE
from .parts import WRITES, Origin, PartWriter
from .slice import Slice


@dataclass(frozen=True)
class Unrolled:
    """A trace in which a slice is carried out, and the origin of each line that it adds."""

    trace: Trace
    origins: dict[str, Origin]


def unroll(trace: Trace, cut: Slice, unit: int = 1) -> Unrolled:
    """Return the trace in which the slice is carried out.

    Args:
        unit: bytes that an allocation is rounded up to.

    Raises:
        ValueError: the trace does not have the ops of the slice, or they can't run there.
    """
    for name, rule in cut.rules:
        if name not in trace.op or len(rule.reads) != len(trace.op[name].reads):
            raise ValueError(f"the trace has no op {name!r} that reads {len(rule.reads)} values, as {cut} needs")
    ops, origins = list(trace.ops), dict[str, Origin]()
    for block in reversed(blocks_of(trace, cut)):
        written = PartWriter(trace, cut, block, unit).write()
        ops = _placed(trace, ops, block, written.ops)
        origins |= written.origins
        origins |= {name: Origin(name, "scale") for name in (block.early.scales if block.early else ())}
    return Unrolled(_once_written(replace(trace, ops=tuple(_with_new_storages(trace, ops)))), origins)


def _placed(trace: Trace, ops: Sequence[Op], block: Block, written: Iterable[Op]) -> list[Op]:
    """Put a block behind all that it reads, and before all that reads it.

    Raises:
        ValueError: ops whose order matters would change places.
    """
    own = set(block.names)
    at = [i for i, op in enumerate(ops) if op.name in own and (op.phase == block.phase or block.early)]
    boundary = next((i for i, op in enumerate(ops) if op.phase == "backward"), len(ops))
    first, end = min(at), boundary if block.early else max(at) + 1
    needed = _ancestors(trace, block.names)
    between = [op for op in ops[first:end] if op.name not in own]
    before = [op for op in between if op.name in needed or op.is_input]
    behind = [op for op in between if op.name not in needed and not op.is_input]
    _check_order(ops, [*before, *(op for op in ops if op.name in own), *behind])
    late = ops[end:]
    if early := block.early:
        late = [early.scaled(op) if op.name in early.scales else op for op in late if op.name not in early.dropped]
    return [*ops[:first], *before, *written, *behind, *late]


def _check_order(before: Sequence[Op], after: Sequence[Op]) -> None:
    """Check that ops that draw random numbers, or write to a storage that others read, stay in their order.

    Raises:
        ValueError: some of them don't.
    """
    index = {op.name: i for i, op in enumerate(before)}
    holds = {op.name: op.holds for op in before}
    last: dict[str, int] = {}
    for op in after:
        touched = {made.name for made in op.makes}.union(*(holds[read] for read in op.reads))
        orders = [f"{held} in place" for held in touched if op.once] + ["the generator"] * bool(op.draws)
        for shared in orders:
            if index[op.name] < last.get(shared, -1):
                raise ValueError(f"{op.name} changes or reads {shared}, and would run behind ops that follow it")
            last[shared] = index[op.name]


def _with_new_storages(trace: Trace, ops: Iterable[Op]) -> Iterator[Op]:
    """Yield the ops; later views of what a slice makes, in a second block too, hold its new storages."""
    before = {op.name: op.holds for op in trace.ops}
    after: dict[str, tuple[str, ...]] = {}
    for op in ops:
        before.setdefault(op.name, op.holds)
        own = {made.name for made in op.makes}
        moved = {
            old: new
            for read in op.reads
            for old, new in zip(before[read], after[read], strict=True)
            if old != new and old not in own
        }
        if not moved.keys().isdisjoint(op.holds):
            op = replace(op, holds=tuple(moved.get(held, held) for held in op.holds))
        after[op.name] = op.holds
        yield op


def _ancestors(trace: Trace, names: Iterable[str]) -> set[str]:
    """Return the names of all ops that these depend on."""
    found, waiting = set[str](), list(names)
    while waiting:
        for read in trace.op[waiting.pop()].reads:
            if read not in found:
                found.add(read)
                waiting.append(read)
    return found


def _once_written(trace: Trace) -> Trace:
    """Mark what makes or reads a storage that a later op writes in place: it may not run again."""
    last = {
        held: i for i, op in enumerate(trace.ops) if op.fn in (*WRITES, SCALE) for held in trace.op[op.reads[0]].holds
    }  # fmt: skip
    for op in trace.ops:
        if op.is_input:  # `summarize` has marked what reads a written one
            last = {held: i for held, i in last.items() if held not in op.holds}

    def marked(i: int, op: Op) -> Op:
        touched = {made.name for made in op.makes} | {held for read in op.reads for held in trace.op[read].holds}
        runs_once = not op.once and op.fn != "getitem" and any(last.get(storage, -1) >= i for storage in touched)
        return replace(op, once=True) if runs_once else op

    return replace(trace, ops=tuple(marked(i, op) for i, op in enumerate(trace.ops)))
