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

from ..analysis.step_graph import sources
from ..ir.liveness import RELEASED
from ..ir.trace import Op, Storage, Trace
from .places import Places, computes


def stage_trace(places: Places, begin: int, end: int) -> Trace:
    """Return the trace of the ops at places `begin` to `end`.

    Received values are inputs, and received gradients tangents. Values that are sent are released once forward has
    ended. Gradients that are sent are returned, and so is each part of a sum, as far as the stage does not add them up.
    """
    trace, maker = places.trace, places.maker
    own = _computed(places, begin, end)
    others = _computed(places, 0, trace.boundary) - own
    _, sent = _needed(places, others)
    kinds = {"forward": RELEASED, "backward": "input_gradient"}
    sends = [(kinds[trace.op[name].phase], name) for name in sent if maker[name] in own]
    returned = [(kind, part) for kind, value in trace.outputs for part in places.parts_of(own, value)]
    outputs = tuple(dict.fromkeys((*returned, *sends)))
    own |= {term for _, value in returned for term in places.terms(value) if term in places.sums}
    wanted, roots = _needed(places, {*own, *(value for _, value in outputs)})
    ops = (*_received(trace, roots), *(op for op in trace.ops if op.name in wanted))
    return Trace(ops, outputs)


def _computed(places: Places, begin: int, end: int) -> set[str]:
    """Return the ops at these places, without inputs, views and sums."""
    placed = zip(places.trace.ops, places.place, strict=True)
    return {op.name for op, place in placed if begin <= place < end and computes(op)} - places.sums


def _needed(places: Places, own: set[str]) -> tuple[set[str], list[str]]:
    """Return the ops of a stage with their inputs and views, and the values of others that it reads."""
    graph, maker = places.graph, places.maker
    wanted = sources(graph, own, graph.nodes - {name for name in places.sendable - own if maker[name] not in own})
    return wanted, [name for name in graph if name not in wanted and not wanted.isdisjoint(graph.successors(name))]


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
