"""Write the ops of a block once for each part of the rows.

    a = mm(x, w)              x__p1 = slice(x);  a__p1 = mm(x__p1, w);  b__p1 = relu(a__p1)
    b = relu(a)        ->     g__p1 = mm(b__p1, v);  copy_(slice(g__parts), g__p1)
    g = mm(b, v)              x__p2 = slice(x);  ...
                              g = alias(g__parts)

What later ops read is written row by row into room for all, and sums over rows are added up in place: those in half
precision in float32.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from ..ir.trace import Op, Storage, Trace, type_nbytes
from .blocks import Block
from .hoist import ONE
from .part_rows import PartRows
from .row_rule import Dims, type_shape
from .slice import Slice

ROWS, EMPTY, WRITE = "aten.slice.Tensor", "aten.empty_strided.default", "aten.copy_.default"
ADD, ADD_PRODUCT, PRODUCT = "aten.add_.Tensor", "aten.addmm_.default", "aten.mm.default"
ADD_BATCHED, BATCHED = "aten.baddbmm_.default", "aten.bmm.default"
ALL, CAST = "aten.alias.default", "aten._to_copy.default"
HALF = ("bf16", "f16")
SUMS = {PRODUCT: ADD_PRODUCT, BATCHED: ADD_BATCHED}  # products that are added to what is there
WRITES = (WRITE, ADD, *SUMS.values())


# part    a captured op on the rows of a part             sum     one whose result the parts behind it are added to
# copy    a captured op on all rows, in forward           one     a tangent of 1
# rows    a view of the rows of a part                    room    where rows are written to
# write   writes or adds a part                           whole   all rows, or the sum, when the last part has run
# widen   to the type in which parts are added up         narrow  back to the type of the captured value
# scale   backward scales what forward has made
OriginKind = Literal["part", "sum", "copy", "one", "rows", "room", "write", "whole", "widen", "narrow", "scale"]


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a line that a slice adds.

    Attributes:
        source: the captured op that it runs, or whose result it views, makes room for, writes or scales.
        kind: what it does.
        view: of a line that is a view: dimension, begin and end.
    """

    source: str
    kind: OriginKind
    view: tuple[int, int, int] | None = None


@dataclass
class PartWriter:
    """Writes the ops of all parts of a block.

    Attributes:
        unit: bytes that an allocation is rounded up to.
        ops: that are written; `made` has them by name, and `origins` what they come from.
    """

    trace: Trace
    cut: Slice
    block: Block
    unit: int
    ops: list[Op] = field(default_factory=list)
    made: dict[str, Op] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)

    def write(self) -> PartWriter:
        """Write them, and return this writer."""
        if self.block.early:
            for op in self.block.early.prologue(self.trace):
                source = op.name.removesuffix(self.block.early.mark)
                self._add(op, Origin(source, "one" if op.fn == ONE else "copy"))
        for name in self.block.names:
            if self.cut.rule[name].makes is not None and name in self.block.returned:
                self._add(self._room(self.trace.op[name]), Origin(name, "room"))
        for part, rows in enumerate(self.cut.part_rows, 1):
            for name in self.block.names:
                self._run(self.trace.op[name], part, rows)
        for name in self.block.names:
            if self.cut.rule[name].makes is None and self._is_rounded(name):
                line = self._cast(self.trace.op[name], self._base(name), self._sum_of(name))
                self._add(line, Origin(name, "narrow"))
            if name in self.block.returned and name not in self._scaled:
                line = self._line(name, ALL, (self._base(name),), self.trace.op[name], self._base(name))
                self._add(line, Origin(name, "whole"))
        return self

    def _run(self, op: Op, part: int, rows: PartRows) -> None:
        """Write an op for one part."""
        rule = self.cut.rule[op.name]
        reads = [self._read(read, dims, part, rows) for read, dims in zip(op.reads, rule.reads, strict=True)]
        if rule.makes is None:
            self._sum(op, reads, part, rows)
            return
        line = self._part(op, self._name(op.name, part), reads, rows, rule.makes)
        self._add(line, Origin(op.name, "part"))
        if op.name in self.block.returned:
            place = self._rows(self._base(op.name), rule.makes, part, rows, f"{op.name}__at{part}")
            name = f"{op.name}__write{part}"
            line = self._line(name, WRITE, (place, line.name), self._known(place), place)
            self._add(line, Origin(op.name, "write"))

    def _sum(self, op: Op, reads: list[str], part: int, rows: PartRows) -> None:
        """Write an op whose results are added up."""
        base, name = self._sum_of(op.name), self._name(op.name, part)
        if part == 1 and not self._is_rounded(op.name):
            self._add(self._run_again(op, base, reads, rows), Origin(op.name, "sum"))
        elif part == 1:
            self._add(self._run_again(op, name, reads, rows), Origin(op.name, "part"))
            self._add(self._cast(replace(op, type=_wide(op.type)), base, name), Origin(op.name, "widen"))
        elif op.fn in SUMS and not self._is_rounded(op.name):
            line = self._line(name, SUMS[op.fn], (base, *reads), op, base)
            self._add(self._priced(line, op, rows), Origin(op.name, "write"))
        else:
            self._add(self._run_again(op, name, reads, rows), Origin(op.name, "part"))
            line = self._line(f"{op.name}__add{part}", ADD, (base, name), self._known(base), base)
            self._add(line, Origin(op.name, "write"))

    def _is_rounded(self, value: str) -> bool:
        """Return True for a sum in half precision: parts are added up in float32."""
        return self.trace.op[value].type.startswith(HALF)

    def _sum_of(self, value: str) -> str:
        """Return the name of what parts are added to."""
        return f"{value}__sum" if self._is_rounded(value) else self._base(value)

    def _cast(self, like: Op, name: str, source: str) -> Op:
        """Return an op that casts a value to the type of another."""
        made = Storage(name, self._rounded(type_nbytes(like.type)))
        return Op(name, CAST, (source,), (made,), (name,), self.block.phase, type=like.type, where=like.where)

    def _run_again(self, op: Op, name: str, reads: list[str], rows: PartRows) -> Op:
        """Return an op on the rows of a part whose result is as large as that on all."""
        makes = tuple(Storage(name + made.name.removeprefix(op.name), made.nbytes) for made in op.makes)
        holds = tuple(made.name for made in makes)
        line = op.rewritten(name, tuple(reads), makes, holds, self.block.phase, op.recomputes)
        return self._priced(line, op, rows)

    def _priced(self, line: Op, op: Op, rows: PartRows) -> Op:
        """Return a line with its share of what an op costs."""
        share = rows.count / self.cut.rows
        return replace(line, us=op.us * share, workspace=round(op.workspace * share))

    def _read(self, value: str, dims: Dims | None, part: int, rows: PartRows) -> str:
        """Return the name of what a part reads for a value."""
        if value in self._own:
            return self._name(value, part)
        source = self.block.early.source(value) if self.block.early else value
        if dims is None:
            return source
        return self._rows(source, dims, part, rows, self._name(f"{source}__{dims[0]}_{dims[1]}", part))

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
            line = self._line(view, ROWS, (value,), replace(base, type=_typed(base.type, tuple(shape))), value)
            self._add(line, Origin(source, "rows", (dim, begin, end)))
            value = view
        return value

    def _part(self, op: Op, name: str, reads: list[str], rows: PartRows, dims: Dims) -> Op:
        """Return an op of the chain for the rows of a part."""
        type = _typed(op.type, rows.shape(type_shape(op.type), dims))
        makes = tuple(
            Storage(name + made.name.removeprefix(op.name), self._rounded(type_nbytes(type))) for made in op.makes
        )
        holds = tuple(made.name for made in makes) or self._viewed(op, reads)
        line = op.rewritten(name, tuple(reads), makes, holds, self.block.phase, op.recomputes)
        return replace(self._priced(line, op, rows), type=type)

    def _viewed(self, op: Op, reads: list[str]) -> tuple[str, ...]:
        """Return the storages that a view of a part holds."""
        held = [new for old, new in zip(op.reads, reads, strict=True) if set(op.holds) & set(self.trace.op[old].holds)]
        return tuple(dict.fromkeys(storage for name in held for storage in self._known(name).holds))

    def _room(self, op: Op) -> Op:
        """Return the op that makes room for the rows of a result."""
        name = self._base(op.name)
        nbytes = self.trace.nbytes[op.holds[0]] if op.makes else self._rounded(type_nbytes(op.type))
        made = Storage(name, nbytes)
        return Op(name, EMPTY, (), (made,), (name,), self.block.phase, type=op.type, where=op.where)

    def _line(self, name: str, fn: str, reads: tuple[str, ...], like: Op, viewed: str) -> Op:
        """Return an op that makes nothing, with a type and a place `like` another's: a view, or one that writes."""
        holds, phase = self._known(viewed).holds, self.block.phase
        return Op(name, fn, reads, (), holds, phase, once=fn in WRITES, type=like.type, where=like.where)

    def _base(self, value: str) -> str:
        """Return the name of what the parts of a value are written to."""
        return f"{value}__parts"

    @property
    def _scaled(self) -> Set[str]:
        """Return the values that backward scales."""
        return self.block.early.scales if self.block.early else set()

    @cached_property
    def _own(self) -> frozenset[str]:
        return frozenset(self.block.names)

    def _name(self, value: str, part: int) -> str:
        return f"{value}__{self.block.letter}{part}"

    def _known(self, name: str) -> Op:
        return self.made.get(name) or self.trace.op[name]

    def _rounded(self, nbytes: int) -> int:
        return -(-nbytes // self.unit) * self.unit

    def _add(self, op: Op, origin: Origin) -> None:
        self.ops.append(op)
        self.made[op.name], self.origins[op.name] = op, origin


def _wide(type: str) -> str:
    """Return a type in float32."""
    return f"f32[{type.partition('[')[2]}"


def _typed(type: str, shape: tuple[int, ...]) -> str:
    """Return a type with another shape."""
    return f"{type.partition('[')[0]}[{', '.join(map(str, shape))}]"
