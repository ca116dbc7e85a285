"""Move each update to the first place where no later op reads what it changes.

    p = mm(d, w)                       p = mm(d, w)
    dw = mm(x, d)                      dw = mm(x, d)
    dv = mm(y, p)               ->     w_update = step(s, w, dw)    # frees dw
    w_update = step(s, w, dw)          dv = mm(y, p)
    v_update = step(r, v, dv)          v_update = step(r, v, dv)

That is behind the last op of backward that reads the parameter, its gradient, or what forward computes from the
parameter, as a plan may recompute that.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from ..ir.trace import Op, Trace


def update_early(trace: Trace) -> Trace:
    """Return the step with early updates; all other ops stay in order."""
    rest = [op for op in trace.ops if op.phase != "update"]
    last_reads = _last_reads(trace, rest)
    behind: dict[int, list[Op]] = defaultdict(list)
    for op in trace.ops:
        if op.phase == "update":
            changed = trace.held_by(op.reads)
            last = max((last_reads.get(storage, -1) for storage in changed), default=-1)
            # What backward does not read is updated at its end.
            behind[last if last >= 0 and rest[last].phase == "backward" else len(rest) - 1].append(op)
    ops = (line for i, op in enumerate(rest) for line in (op, *behind[i]))
    return replace(trace, ops=tuple(ops))


def _last_reads(trace: Trace, ops: list[Op]) -> dict[str, int]:
    """Map each storage to the last op (by index) that makes or reads it, or what forward computes from it."""
    result: dict[str, int] = {}
    for i, op in enumerate(ops):
        if not op.is_input:
            for storage in trace.held_by([op.name, *op.reads]):
                result[storage] = i
    for op in reversed(ops):
        if op.phase == "forward" and not op.is_input:
            last = max((result[made.name] for made in op.makes), default=-1)
            for held in trace.held_by(op.reads):
                result[held] = max(result.get(held, -1), last)
    return result
