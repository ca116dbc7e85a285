"""Let each update run as soon as nobody wants any more what it changes.

    p = mm(d, w)                       p = mm(d, w)
    dw = mm(x, d)                      dw = mm(x, d)
    dv = mm(y, p)               ->     w_update = step(s, w, dw)    # dw's bytes go here
    w_update = step(s, w, dw)          dv = mm(y, p)
    v_update = step(r, v, dv)          v_update = step(r, v, dv)

That is behind the last op of backward that reads the parameter, or its gradient, or anything that forward makes of the
parameter: a plan may make that again for it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from ..ir.trace import Op, Trace


def update_early(trace: Trace) -> Trace:
    """The step with its updates as early as they may be; all other ops stay in their order."""
    rest = [op for op in trace.ops if op.phase != "update"]
    wanted = _wanted(trace, rest)
    behind: dict[int, list[Op]] = defaultdict(list)
    for op in trace.ops:
        if op.phase == "update":
            changed = (held for read in op.reads for held in trace.op[read].holds)
            last = max((wanted.get(storage, -1) for storage in changed), default=-1)
            # What backward does not touch is updated when it has ended.
            behind[last if last >= 0 and rest[last].phase == "backward" else len(rest) - 1].append(op)
    ops = (line for i, op in enumerate(rest) for line in (op, *behind[i]))
    return replace(trace, ops=tuple(ops))


def _wanted(trace: Trace, ops: list[Op]) -> dict[str, int]:
    """The last op (by index) that makes or reads each storage, or what forward makes of it."""
    found: dict[str, int] = {}
    for i, op in enumerate(ops):
        if not op.is_input:
            for storage in (*op.holds, *(held for read in op.reads for held in trace.op[read].holds)):
                found[storage] = i
    for op in reversed(ops):
        if op.phase == "forward" and not op.is_input:
            last = max((found[made.name] for made in op.makes), default=-1)
            for read in op.reads:
                for held in trace.op[read].holds:
                    found[held] = max(found.get(held, -1), last)
    return found
