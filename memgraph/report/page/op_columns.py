"""The ops of a plan as columns: names, places, prices.

add_1, add_2, add_2__out   ->   stems "add_", "add_", "__out"; numbers one up; the last belongs to the op before it
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

from passes import Forecast, Op, Trace
from passes.ir.ops import is_runtime, value_of
from passes.ir.trace import PHASES

from .packing import Column, Strings, packed


def op_columns(forecast: Forecast, strings: Strings) -> dict[str, Any]:
    """Return names, places and prices. The name of an op that a plan adds is that of its value and a suffix."""
    trace, ops = forecast.trace, forecast.trace.ops
    of = [_original(trace, index) for index in range(len(ops))]
    parts = [_parts(op, ops[own], own == index) for index, (op, own) in enumerate(zip(ops, of, strict=True))]
    last: dict[str, int] = {}
    counts = []
    for stem, number in parts:  # numbers of one stem mostly go up by one
        counts.append(number - last.get(stem, -1))
        last[stem] = number
    return {
        "count": len(ops),
        "of": packed(index - own for index, own in enumerate(of)),
        "stem": strings.column(stem for stem, _ in parts),
        "number": packed(counts),
        "fn": strings.column(op.fn for op in ops),
        "type": strings.column(op.type for op in ops),
        "where": strings.column(op.where for op in ops),
        "phase": packed(PHASES.index(op.phase) for op in ops),
        "again": packed(bool(op.recomputes) for op in ops),
        "once": packed(op.once or op.is_input for op in ops),
        "tenths": durations(forecast),
        "workspace": packed(forecast.by_kind["workspace"]),
    }


def _original(trace: Trace, index: int) -> int:
    """Return the index of the op whose value this op recomputes, copies or waits for; else its own."""
    op = trace.ops[index]
    value = op.recomputes or (value_of(op.name) if is_runtime(op.fn) else op.name)
    return trace.index.get(value, index) if op.name.startswith(value) else index


def _parts(op: Op, own: Op, is_own: bool) -> tuple[str, int]:
    """Return the stem and the number of a name; -1 without a number. Of an added op, the suffix."""
    if not is_own:
        return op.name.removeprefix(own.name), -1
    match = re.fullmatch(r"(.*?)(0|[1-9]\d{0,8})", op.name)
    return (match[1], int(match[2])) if match else (op.name, -1)


def durations(forecast: Forecast) -> Column:
    """Return the time from the begin of each op to that of the next, rounded so that no error adds up."""
    begins = [round(us * 10) for us in (*forecast.begins, forecast.us)]
    return packed(later - earlier for earlier, later in pairwise(begins))
