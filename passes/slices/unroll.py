"""Carry out a slice: write the ops of its chain once for each part of the rows.

    a = mm(x, w)                          g = empty_strided()
    b = relu(a)                           x__p1 = slice(x);  a__p1 = mm(x__p1, w);  b__p1 = relu(a__p1)
    g = mm(b, v)              ->          g__p1 = mm(b__p1, v);  g__at1 = slice(g);  g__write1 = copy_(g__at1, g__p1)
    s = mm(b_t, g)                        s = mm(b_t__p1, g__p1)
                                          x__p2 = slice(x);  ...;  s__p2 = addmm_(s, b_t__p2, g__p2)

So a and b are never whole. Results that later ops read are written row by row, and sums over rows added up in place.

A chain of forward and backward runs in forward, so that nothing runs twice (`hoist.py`). Its backward ops are linear in
the tangent: they take 1 for it, and backward scales what they make.

    l = loss(b);  d = loss_backward(t, b);  s = mm(d, x)    ->    s__parts = mm(d__p1, x__p1); ...
                                                                  s = scale_(s__parts, t)      # in backward
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ..ir.trace import Op, Storage, Trace, type_nbytes
from .hoist import SCALE, Hoisted, hoisted
from .part_rows import PartRows
from .row_rule import Dims, type_shape
from .slice import Slice

ROWS, EMPTY, WRITE = "aten.slice.Tensor", "aten.empty_strided.default", "aten.copy_.default"
ADD, ADD_PRODUCT, PRODUCT = "aten.add_.Tensor", "aten.addmm_.default", "aten.mm.default"


@dataclass(frozen=True, slots=True)
class Origin:
    """What a line that a slice adds comes from.

    Attributes:
        source: the captured op that it runs, or whose result it makes room for, writes or scales.
        view: of a line that is a view: dimension, begin and end.
    """

    source: str
    view: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class Unrolled:
    """A trace in which a slice is carried out, and the origin of each line that it adds."""

    trace: Trace
    origins: dict[str, Origin]


def unroll(trace: Trace, cut: Slice, block: int = 1) -> Unrolled:
    """Return the trace in which the slice is carried out.

    Args:
        block: bytes that an allocation is rounded up to.

    Raises:
        ValueError: the trace does not have the ops of the slice, or they can't run there.
    """
    if missing := [name for name, rule in cut.rules if name not in trace.op or len(rule.reads) != len(trace.op[name].reads)]:
        raise ValueError(f"{cut}: the trace has no such op {missing[0]!r}")
    early = hoisted(trace, cut.rule)
    parts = _Parts(trace, cut, early, block)
    parts.write()
    ops = _in_place(trace, cut, early, parts.ops)
    scaled = {name: Origin(name) for name in early.scales} if early else {}
    return Unrolled(_once_written(replace(trace, ops=tuple(_with_new_storages(trace, ops)))), parts.origins | scaled)


def part_name(value: str, part: int) -> str:
    return f"{value}__p{part}"


def _in_place(trace: Trace, cut: Slice, early: Hoisted | None, block: Iterable[Op]) -> list[Op]:
    """Put the block behind all that it reads, and before all that reads it."""
    indices = [trace.index[name] for name in cut.rule]
    first, end = min(indices), trace.boundary if early else max(indices) + 1
    needed = _ancestors(trace, cut.rule)
    between = [op for op in trace.ops[first:end] if op.name not in cut.rule]
    before = [op for op in between if op.name in needed or op.is_input]
    behind = [op for op in between if op.name not in needed and not op.is_input]
    _check_order(trace, [*before, *map(trace.op.__getitem__, cut.rule), *behind])
    late = list(trace.ops[end:])
    if early:
        late = [early.scaled(op) if op.name in early.scales else op for op in late if op.name not in early.dropped]
    return [*trace.ops[:first], *before, *block, *behind, *late]


def _check_order(trace: Trace, ops: Sequence[Op]) -> None:
    """Check that ops that draw random numbers, or write to a storage that others read, stay in their order.

    Raises:
        ValueError: some of them don't.
    """
    last: dict[str, int] = {}
    for op in ops:
        touched = {made.name for made in op.makes} | trace.held_by(op.reads)
        orders = [f"{held} in place" for held in touched if op.once] + ["the generator"] * bool(op.draws)
        for shared in orders:
            if trace.index[op.name] < last.get(shared, -1):
                raise ValueError(f"{op.name} changes or reads {shared}, and would run behind ops that follow it")
            last[shared] = trace.index[op.name]


def _with_new_storages(trace: Trace, ops: Iterable[Op]) -> Iterator[Op]:
    """Yield the ops; later views of what a slice makes hold its new storages."""
    holds: dict[str, tuple[str, ...]] = {}
    for op in ops:
        own = {made.name for made in op.makes}
        moved = {
            old: new
            for read in op.reads
            if read in trace.op
            for old, new in zip(trace.op[read].holds, holds[read], strict=True)
            if old != new
        }
        if op.name in trace.op and not moved.keys().isdisjoint(op.holds):
            op = replace(op, holds=tuple(held if held in own else moved.get(held, held) for held in op.holds))
        holds[op.name] = op.holds
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
    """Mark what makes or reads a storage that is written in place: it may not run again."""
    writes = (WRITE, ADD, ADD_PRODUCT, SCALE)
    written = {held for op in trace.ops if op.fn in writes for held in trace.op[op.reads[0]].holds}
    inputs = {made.name for op in trace.ops if op.is_input for made in op.makes}
    written -= inputs  # as `summarize` has them already

    def marked(op: Op) -> Op:
        touched = {made.name for made in op.makes} | {held for read in op.reads for held in trace.op[read].holds}
        runs_once = not op.once and not op.is_input and op.fn != "getitem" and not written.isdisjoint(touched)
        return replace(op, once=True) if runs_once else op

    return replace(trace, ops=tuple(map(marked, trace.ops)))


@dataclass
class _Parts:
    """Writes the ops of all parts."""

    trace: Trace
    cut: Slice
    early: Hoisted | None
    block: int
    ops: list[Op] = field(default_factory=list)
    made: dict[str, Op] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)

    def write(self) -> None:
        """Write them."""
        if self.early:
            for op in self.early.prologue(self.trace):
                self._add(op, Origin(op.name.removesuffix(self.early.mark)))
        for name, rule in self.cut.rules:
            if rule.makes is not None and name in self._returned:
                self._add(self._room(self.trace.op[name]), Origin(name))
        for part, rows in enumerate(self.cut.part_rows, 1):
            for name in self.cut.rule:
                self._run(self.trace.op[name], part, rows)

    @property
    def _returned(self) -> set[str]:
        """Return the values that ops outside of the chain read, or the step returns."""
        return returned_values(self.trace, self.cut.rule)

    def _run(self, op: Op, part: int, rows: PartRows) -> None:
        """Write an op for one part."""
        rule = self.cut.rule[op.name]
        reads = [self._read(read, dims, part, rows) for read, dims in zip(op.reads, rule.reads, strict=True)]
        if rule.makes is None:
            self._sum(op, reads, part, rows)
            return
        line = self._part(op, part_name(op.name, part), reads, rows, rule.makes)
        self._add(line, Origin(op.name))
        if op.name in self._returned:
            place = self._rows(self._base(op.name), rule.makes, part, rows, f"{op.name}__at{part}")
            name = f"{op.name}__write{part}"
            write = self._line(name, WRITE, (place, line.name), op, type=self.made[place].type, holds_of=place)
            self._add(write, Origin(op.name))

    def _sum(self, op: Op, reads: list[str], part: int, rows: PartRows) -> None:
        """Write an op whose results are added up."""
        base, share, origin = self._base(op.name), rows.count / self.cut.rows, Origin(op.name)
        cost = {"us": op.us * share, "workspace": round(op.workspace * share)}
        if part > 1 and op.fn == PRODUCT:
            line = self._line(part_name(op.name, part), ADD_PRODUCT, (base, *reads), op, type=op.type, holds_of=base)
            self._add(replace(line, **cost), origin)
            return
        name = base if part == 1 else part_name(op.name, part)
        makes = tuple(Storage(name + made.name.removeprefix(op.name), made.nbytes) for made in op.makes)
        holds = tuple(made.name for made in makes)
        phase = self._phase(op)
        self._add(replace(op, name=name, reads=tuple(reads), makes=makes, holds=holds, phase=phase, **cost), origin)
        if part > 1:
            self._add(self._line(f"{op.name}__add{part}", ADD, (base, name), op, type=op.type, holds_of=base), origin)

    def _read(self, value: str, dims: Dims | None, part: int, rows: PartRows) -> str:
        """Return the name of what a part reads for a value."""
        if value in self.cut.rule:
            return part_name(value, part)
        source = self.early.source(value) if self.early else value
        return source if dims is None else self._rows(source, dims, part, rows, part_name(f"{source}__{dims[0]}", part))

    def _rows(self, source: str, dims: Dims, part: int, rows: PartRows, name: str) -> str:
        """Write views that lead to the rows of a part, and return the name of the last."""
        while name in self.trace.op:  # of another slice
            name = f"{name}_"
        if name in self.made:
            return name
        base = self._known(source)
        shape, value, views = list(type_shape(base.type)), source, list(rows.views(type_shape(base.type), dims))
        for i, (dim, begin, end) in enumerate(views):
            shape[dim] = end - begin
            view = name if i == len(views) - 1 else f"{name}_{i}"
            type = _typed(base.type, tuple(shape))
            self._add(self._line(view, ROWS, (value,), base, type=type, holds_of=value), Origin(source, (dim, begin, end)))
            value = view
        return value

    def _part(self, op: Op, name: str, reads: list[str], rows: PartRows, dims: Dims) -> Op:
        """Return an op of the chain for the rows of a part."""
        whole = type_shape(op.type)
        type, share = _typed(op.type, rows.shape(whole, dims)), rows.count / self.cut.rows
        if op.makes:
            makes = tuple(
                Storage(name + made.name.removeprefix(op.name), self._rounded(type_nbytes(type))) for made in op.makes
            )
            holds = tuple(made.name for made in makes)
        else:
            makes, holds = (), self._viewed(op, reads)
        return replace(
            op, name=name, reads=tuple(reads), makes=makes, holds=holds, type=type, phase=self._phase(op),
            us=op.us * share, workspace=round(op.workspace * share),
        )  # fmt: skip

    def _viewed(self, op: Op, reads: list[str]) -> tuple[str, ...]:
        """Return the storages that a view of a part holds."""
        held = [new for old, new in zip(op.reads, reads, strict=True) if set(op.holds) & set(self.trace.op[old].holds)]
        return tuple(dict.fromkeys(storage for name in held for storage in self._known(name).holds))

    def _room(self, op: Op) -> Op:
        """Return the op that makes room for the rows of a result."""
        name = self._base(op.name)
        nbytes = self.trace.nbytes[op.holds[0]] if op.makes else self._rounded(type_nbytes(op.type))
        made = Storage(name, nbytes)
        return Op(name, EMPTY, (), (made,), (name,), self._phase(op), type=op.type, where=op.where)

    def _line(self, name: str, fn: str, reads: tuple[str, ...], like: Op, *, type: str, holds_of: str) -> Op:
        """Return an op that makes nothing: a view, or one that writes."""
        phase = self._phase(like)
        return Op(name, fn, reads, (), self._known(holds_of).holds, phase, once=fn != ROWS, type=type, where=like.where)

    def _base(self, value: str) -> str:
        """Return the name of what the parts of a value are written to."""
        return f"{value}__parts" if self.early and value in self.early.scales else value

    def _phase(self, op: Op) -> str:
        return "forward" if self.early else self._own_phase  # a view of a forward value stands in backward too

    @property
    def _own_phase(self) -> str:
        return self.trace.op[self.cut.rules[0][0]].phase

    def _known(self, name: str) -> Op:
        return self.made.get(name) or self.trace.op[name]

    def _rounded(self, nbytes: int) -> int:
        return -(-nbytes // self.block) * self.block

    def _add(self, op: Op, origin: Origin) -> None:
        self.ops.append(op)
        self.made[op.name], self.origins[op.name] = op, origin


def returned_values(trace: Trace, names: Iterable[str]) -> set[str]:
    """Return those of these values that other ops read, or the step returns."""
    own = set(names)
    read = {read for op in trace.ops if op.name not in own for read in op.reads}
    return own & (read | {value for _, value in trace.outputs})


def _typed(type: str, shape: tuple[int, ...]) -> str:
    """Return a type with another shape."""
    return f"{type.partition('[')[0]}[{', '.join(map(str, shape))}]"
