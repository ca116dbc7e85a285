"""Backward in two: what leads to gradients that are sent, and behind it the gradients of parameters.

    ga = mm(d, w)                     ga = mm(d, w)        sent
    gw = mm(d, x)              ->     gx = mm(ga, v)       sent
    gx = mm(ga, v)                    gw = mm(d, x)
    gv = mm(ga, y)                    gv = mm(ga, y)

Source: zero bubble pipeline parallelism (2401.10241).
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import replace

from ..ir.trace import Op, Trace
from .places import computes

SENT = ("watched", "input_gradient")  # kinds of outputs


def weights_last(trace: Trace) -> Trace:
    """Return the trace with the ops of gradients that are not sent at its end; as it is if none is sent."""
    weights = weight_ops(trace)
    ops = sorted(trace.ops, key=lambda op: op.name in weights)
    return replace(trace, ops=tuple(ops)) if weights else trace


def weight_ops(trace: Trace) -> frozenset[str]:
    """Return the ops of backward that lead to no gradient that is sent; none if no gradient is sent.

    What is written in place stays with the ops around it.
    """
    sent = {value for kind, value in trace.outputs if kind in SENT}
    backward = [op for op in trace.ops[trace.boundary :] if not op.is_input]
    written = _written(trace, backward)
    needed = set(sent)
    for op in reversed(backward):
        if op.name in needed or not written.isdisjoint((*op.holds, *trace.held_by(op.reads))):
            needed |= {op.name, *op.reads}
    return frozenset(op.name for op in backward if op.name not in needed) if sent else frozenset()


def first_weight_op(planned: Trace, weights: Container[str]) -> int | None:
    """Return the place of the first of these ops in a planned trace; None if there are none."""
    return next((i for i, op in enumerate(planned.ops) if op.name in weights), None)


def _written(trace: Trace, ops: Iterable[Op]) -> frozenset[str]:
    """Return the storages that these ops write in place, but for gradients that they add to."""
    kept = {made.name for op in trace.ops if op.is_input for made in op.makes}
    return frozenset(held for op in ops if computes(op) and not op.makes for held in op.holds) - kept
