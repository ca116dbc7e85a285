"""The trace of one stage: its ops, what it receives as inputs, and what it sends as outputs.

    a = mm(x, w)                        a = input()                    received from stage 0
    ---- cut ----               ->      b = relu(a)
    b = relu(a)                         ga = relu_backward(d, b)
    ga = relu_backward(d, b)            return input_gradient ga       sent to stage 0
    gw = mm(x, ga)

Values are sent as the storage that they hold; a stage makes the views that it reads itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..ir.liveness import RELEASED
from ..ir.trace import Op, Storage, Trace
from .places import Places, computes


def stage_trace(places: Places, begin: int, end: int, sums: frozenset[str] = frozenset()) -> Trace:
    """Return the trace of the ops at places `begin` to `end`.

    Received values are inputs, and received gradients tangents. Values that are sent are released once forward has
    ended. Gradients that are sent are returned, and so is each part of a sum in `sums`.
    """
    trace = places.trace
    own = _computed(places, begin, end) - sums
    others = _computed(places, 0, trace.boundary) - own - sums
    _, sent = _needed(trace, others)
    kinds = {"forward": RELEASED, "backward": "input_gradient"}
    sends = [(kinds[trace.op[name].phase], name) for name in sent if _maker(trace, name) in own]
    outputs = tuple(dict.fromkeys((*_results(trace, own, sums), *sends)))
    wanted, roots = _needed(trace, [*own, *(value for _, value in outputs)])
    ops = (*_received(trace, roots), *(op for op in trace.ops if op.name in wanted))
    return Trace(ops, outputs)


def _computed(places: Places, begin: int, end: int) -> set[str]:
    """Return the ops at these places, without inputs and views."""
    placed = zip(places.trace.ops, places.place, strict=True)
    return {op.name for op, place in placed if begin <= place < end and computes(op)}


def _needed(trace: Trace, own: Iterable[str]) -> tuple[set[str], list[str]]:
    """Return the ops of a stage with their inputs and views, and the values of others that it reads."""
    ours = set(own)
    wanted, roots, todo = set[str](), set[str](), list(ours)
    while todo:
        name = todo.pop()
        if name in wanted or name in roots:
            continue
        op = trace.op[name]
        if name not in ours and not op.is_input and _is_root(trace, op) and _maker(trace, name) not in ours:
            roots.add(name)
        else:
            wanted.add(name)
            todo += op.reads
    return wanted, [op.name for op in trace.ops if op.name in roots]


def _is_root(trace: Trace, op: Op) -> bool:
    """Return True for what is sent as it is: the value of an op, or an item of it if these are several."""
    return computes(op) or any(len(trace.op[read].holds) > len(op.holds) for read in op.reads)


def _maker(trace: Trace, name: str) -> str:
    """Return the op that computes a value, which may be a view of it."""
    while not computes(trace.op[name]) and trace.op[name].reads:
        name = trace.op[name].reads[0]
    return name


def _received(trace: Trace, roots: Iterable[str]) -> Iterator[Op]:
    """Yield an input for each received value; one whose storage has come with another value is a view of that."""
    holder: dict[str, str] = {}
    for name in roots:
        op = trace.op[name]
        new = tuple(Storage(held, trace.nbytes[held]) for held in op.holds if held not in holder)
        known = tuple(dict.fromkeys(holder[held] for held in op.holds if held in holder))
        fn = "received" if known else "input" if op.phase == "forward" else "tangent"
        yield Op(name, fn, known, new, op.holds, type=op.type, where=op.where)
        holder |= {storage.name: name for storage in new}


def _results(trace: Trace, own: set[str], sums: frozenset[str]) -> Iterator[tuple[str, str]]:
    """Yield the step's outputs that this stage makes, and its parts of sums."""
    for kind, value in trace.outputs:
        todo = [value]
        while todo:
            name = todo.pop()
            if name in sums:
                todo += trace.op[name].reads
            elif _maker(trace, name) in own:
                yield kind, name
