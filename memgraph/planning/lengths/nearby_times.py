"""Times of a step's ops, scaled from a step of the same ops with another length.

mm: reads and makes 128 kB, 40 us   ->   mm: reads and makes 96 kB, 30 us

Only times are: bytes follow from the graph, and workspaces are measured for each length.
"""

from __future__ import annotations

from dataclasses import replace

from passes import Op, Trace


def scaled_times(trace: Trace, known: Trace) -> Trace:
    """Return the trace with times in proportion to those of `known`; an op that it lacks keeps its own."""
    before, touched = known.op, _touched(known)
    now = _touched(trace)

    def scaled(op: Op) -> Op:
        like = before.get(op.name)
        if like is None or like.fn != op.fn or not touched[op.name]:
            return op
        return replace(op, us=round(like.us * now[op.name] / touched[op.name], 1))

    return replace(trace, ops=tuple(map(scaled, trace.ops)))


def _touched(trace: Trace) -> dict[str, int]:
    """Return the bytes of what each op reads and makes."""
    held = {op.name: sum(trace.nbytes.get(storage, 0) for storage in op.holds) for op in trace.ops}
    return {op.name: held[op.name] + sum(held.get(read, 0) for read in op.reads) for op in trace.ops}
