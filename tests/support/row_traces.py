"""Small steps as text whose ops run on rows, with facts from a dictionary, and numbers for them.

    HEAD                      a head with its loss: mm, softmax and their gradients
    facts_of(trace)           what each op does on rows, by its fn
    run(trace, origins)       the outputs, with numpy: of a step as it is, or of one in slices

Numbers are whole, so a sum has the same bits in any order. Room is full of a large number until it is written to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from hypothesis import note
from hypothesis import strategies as st

from passes import Trace, check, parse
from passes.slices import parts
from passes.slices.hoist import ONE, SCALE
from passes.slices.parts import Origin
from passes.slices.row_rule import RowFacts, parse_rule, type_shape

HEAD = parse("""
    forward:
    x = input()  # f32[8, 4] | makes x:128
    y = input()  # f32[8, 1] | makes y:32
    w = parameter()  # f32[4, 16] | makes w:256
    g = tangent()  # f32[] | makes g:4
    h = relu(x)  # f32[8, 4] | makes h:128 | 8.0 us
    a = aten.mm.default(h, w)  # f32[8, 16] | makes a:512 | 16.0 us | workspace 64 | at head
    b = square(a)  # f32[8, 16] | makes b:512 | 8.0 us | at loss
    c = add(b, y)  # f32[8, 16] | makes c:512 | 8.0 us | at loss
    l = total(c)  # f32[] | makes l:4 | at loss
    backward:
    d = scale(g, c)  # f32[8, 16] | makes d:512 | 8.0 us | at loss
    e = mul(d, a)  # f32[8, 16] | makes e:512 | 8.0 us | at loss
    w_t = t(w)  # f32[16, 4] | holds w
    dh = aten.mm.default(e, w_t)  # f32[8, 4] | makes dh:128 | 16.0 us | at head
    h_t = t(h)  # f32[4, 8] | holds h
    dw = aten.mm.default(h_t, e)  # f32[4, 16] | makes dw:256 | 16.0 us | at head
    dx = mul(dh, x)  # f32[8, 4] | makes dx:128 | 8.0 us
    return output l, gradient dw, input_gradient dx
""")
SAME = ("0:1<0:1", "1:2<1:2")
BOTH = ("0:1<0:1,0:1", "1:2<1:2,1:2")
FACTS: Mapping[str, tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]] = {
    "relu": (SAME, ()),
    "square": (SAME, ()),
    "neg": (SAME, ((0,),)),
    "mul": (BOTH, ((0,), (1,))),
    "plus": (BOTH, ((0, 1),)),
    "add": (("0:1<0:1,0:1", "1:2<1:2,-"), ((0, 1),)),  # a column to a matrix
    "by": (("0:1<0:1,0:1", "1:2<1:2,-"), ((0,), (1,))),
    "across": (("0:1<0:1",), ((0,),)),
    "scale": (("0:1<-,0:1", "1:2<-,1:2"), ((0,), (1,))),
    "t": (("0:1<1:2", "1:2<0:1"), ((0,),)),
    "split": (("0:2<0:1",), ((0,),)),
    "total": (("+<0:1", "+<1:2"), ((0,),)),
    "aten.mm.default": (("0:1<0:1,-", "1:2<-,1:2", "+<1:2,0:1"), ((0,), (1,))),
}
EMPTY_ROOM = -1e9


def facts_of(trace: Trace, **other: RowFacts) -> Callable[[str], RowFacts]:
    """Return the facts of the ops of a trace, by name; those in `other` as they are there."""

    def facts(name: str) -> RowFacts:
        rules, linear = FACTS.get(trace.op[name].fn, ((), ()))
        return other.get(name) or RowFacts(tuple(map(parse_rule, rules)), linear)

    return facts


def wide_values(trace: Trace) -> list[str]:
    """Return the ops of a step of `row_steps` that make one of its large values."""
    return [op.name for op in trace.ops if op.type == "f32[8, 16]"]


def run(trace: Trace, origins: Mapping[str, Origin] | None = None, tangent: float = 3.0) -> dict[str, Any]:
    """Return the outputs of a step by kind and number."""
    values: dict[str, Any] = {}
    for op in trace.ops:
        reads = [values[read] for read in op.reads]
        if op.is_input:
            values[op.name] = np.array(tangent) if op.fn == "tangent" else _numbers(op.name, type_shape(op.type))
        elif op.fn == parts.ROWS:
            view = origins[op.name].view if origins else None
            assert view is not None
            dim, begin, end = view
            values[op.name] = reads[0][(slice(None),) * dim + (slice(begin, end),)]
        elif op.fn in ROOMS:
            values[op.name] = np.full(type_shape(op.type), ROOMS[op.fn])
        else:
            values[op.name] = np.asarray(RUNS[op.fn](*reads))
        if op.type:
            assert np.shape(values[op.name]) == type_shape(op.type), str(op)
    return {f"{kind} {i}": values[value].copy() for i, (kind, value) in enumerate(trace.outputs)}


def same(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    return ours.keys() == theirs.keys() and all(np.array_equal(ours[key], theirs[key]) for key in ours)


def _numbers(name: str, shape: tuple[int, ...]) -> Any:
    return np.random.default_rng(len(name) + ord(name[0])).integers(-2, 3, shape).astype(np.float64)


def _in_place(change: Callable[..., Any], target: Any, *reads: Any) -> Any:
    target[...] = change(target, *reads)
    return target


ROOMS = {parts.EMPTY: EMPTY_ROOM, ONE: 1.0}
RUNS: dict[str, Callable[..., Any]] = {
    "relu": lambda x: np.maximum(x, 0),
    "square": np.square,
    "neg": np.negative,
    "mul": np.multiply,
    "plus": np.add,
    "add": np.add,
    "by": np.multiply,
    "across": lambda x: x.sum(1, keepdims=True),
    "scale": np.multiply,
    "t": np.transpose,
    "total": np.sum,
    "mixed": lambda x: x - x.sum(0),
    "aten.mm.default": np.matmul,
    parts.ALL: lambda x: x,
    parts.WRITE: partial(_in_place, lambda target, x: x),
    parts.ADD: partial(_in_place, np.add),
    parts.ADD_PRODUCT: partial(_in_place, lambda target, a, b: target + a @ b),
    SCALE: partial(_in_place, np.multiply),
}


@dataclass
class _Writer:
    """Writes ops as lines; `wide` are the forward values of [8, 16], `columns` of [8, 1], `grads` the backward ones."""

    draw: st.DrawFn
    lines: list[str] = field(default_factory=list)
    wide: list[str] = field(default_factory=list)
    columns: list[str] = field(default_factory=lambda: ["y"])
    grads: list[str] = field(default_factory=list)
    handed: list[str] = field(default_factory=list)

    def add(self, fn: str, reads: Sequence[str], shape: str = "8, 16", holds: str = "") -> str:
        name = f"{fn.replace('aten.', '').replace('.default', '')}_{len(self.lines)}"
        nbytes = 4 * int(np.prod([int(size) for size in shape.split(",")])) if shape else 4
        note = f"holds {holds}" if holds else f"makes {name}:{nbytes}"
        self.lines.append(f"{name} = {fn}({', '.join(reads)})  # f32[{shape}] | {note} | 8.0 us")
        return name

    def pick(self, names: Sequence[str]) -> str:
        return self.draw(st.sampled_from(names))

    def forward(self) -> None:
        """Write ops on rows, sums over them, and ops that mix rows."""
        self.wide.append(self.add("aten.mm.default", ("x", "w")))
        for kind in self.draw(st.lists(st.integers(0, 7), max_size=8)):
            one, other = self.pick(self.wide), self.pick(self.wide)
            match kind:
                case 0 | 1:
                    self.wide.append(self.add(("relu", "neg")[kind], (one,)))
                case 2 | 3 if one != other:
                    self.wide.append(self.add(("plus", "mul")[kind - 2], (one, other)))
                case 4:
                    self.wide.append(self.add("add", (one, self.pick(self.columns))))
                case 5:
                    self.wide.append(self.add("mixed", (one,)))  # which has no facts
                case 6:
                    self.handed.append(f"output {self.add('total', (one,), '')}")
                case 7:
                    self.columns.append(self.add("across", (one,), "8, 1"))
        self.handed.append(f"output {self.add('total', (self.wide[-1],), '')}")

    def backward(self) -> None:
        """Write ops that are linear in the tangent, or not, and gradients."""
        self.lines.append("backward:")
        self.grads.append(self.add("scale", ("g", self.pick(self.wide))))
        for kind in self.draw(st.lists(st.integers(0, 5), max_size=6)):
            one, other = self.pick(self.grads), self.pick(self.grads)
            match kind:
                case 0:
                    self.grads.append(self.add("mul", (one, self.pick(self.wide))))
                case 1 if one != other:
                    self.grads.append(self.add("plus", (one, other)))
                case 2:
                    self.grads.append(self.add("plus", (one, self.pick(self.wide))))  # linear in neither alone
                case 3:
                    self.grads.append(self.add("square", (one,)))  # not linear
                case 5:
                    self.grads.append(self.add("by", (one, self.pick(self.columns))))
                case 4:
                    x_t = self.add("t", ("x",), "4, 8", "x")
                    self.handed.append(f"gradient {self.add('aten.mm.default', (x_t, one), '4, 16')}")
        w_t = self.add("t", ("w",), "16, 4", "w")
        self.handed.append(f"input_gradient {self.add('aten.mm.default', (self.grads[-1], w_t), '8, 4')}")


@st.composite
def row_steps(draw: st.DrawFn) -> Trace:
    """Draw a step whose ops mostly run on rows."""
    writer = _Writer(draw)
    writer.lines += ["forward:", *map(str, HEAD.ops[:4])]
    writer.forward()
    if draw(st.booleans()):
        writer.backward()
    text = "\n".join([*writer.lines, f"return {', '.join(writer.handed)}"])
    note(text)
    trace = parse(text)
    check(trace)
    return trace
