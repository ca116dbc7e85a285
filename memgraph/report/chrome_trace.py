"""A planned step as a Chrome trace, which Perfetto and chrome://tracing show: queues, and memory by kind.

    ph "X"   an op, a copy or a collective on its queue, with module, source line and bytes
    ph "C"   bytes on the device by kind, at the begin of each op

Times are microseconds from the begin of the step.  Format: "Trace Event Format", Google, 2016.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from passes import KINDS, Copy, Forecast

QUEUES = ("compute", "out", "back", "net")  # threads of the trace, in this order
PROCESS = 1


def chrome_trace(forecast: Forecast) -> dict[str, Any]:
    """Return the trace of a forecast, for `json.dump`."""
    queues = [*QUEUES, *dict.fromkeys(_queue(copy) for copy in forecast.copies if copy.tier)]
    return {"traceEvents": [*_named(queues), *_ops(forecast), *_copies(forecast, queues), *_memory(forecast)]}


def _queue(copy: Copy) -> str:
    """Return the name of a queue: those of tiers behind the nearest have the tier's."""
    return f"{copy.queue} {copy.tier}".strip()


def _named(queues: Sequence[str]) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": PROCESS, "name": "process_name", "args": {"name": "planned step"}}
    for i, queue in enumerate(queues):
        yield {"ph": "M", "pid": PROCESS, "tid": i, "name": "thread_name", "args": {"name": queue}}
        yield {"ph": "M", "pid": PROCESS, "tid": i, "name": "thread_sort_index", "args": {"sort_index": i}}


def _ops(forecast: Forecast) -> Iterator[dict[str, Any]]:
    ends = (*forecast.begins[1:], forecast.us)
    for op, begin, end in zip(forecast.trace.ops, forecast.begins, ends, strict=True):
        if not op.is_input:
            facts = {"op": op.name, "where": op.where, "type": op.type, "bytes": op.nbytes, "workspace": op.workspace}
            facts |= {"recomputes": op.recomputes} if op.recomputes else {}
            yield _event(op.fn, op.phase, 0, begin, end, facts)


def _copies(forecast: Forecast, queues: Sequence[str]) -> Iterator[dict[str, Any]]:
    for copy in forecast.copies:
        op = forecast.trace.op.get(copy.value)
        facts = {"op": copy.value, "where": op.where if op else ""}
        yield _event(copy.value, copy.queue, queues.index(_queue(copy)), copy.begin, copy.end, facts)


def _event(name: str, kind: str, thread: int, begin: float, end: float, facts: dict[str, Any]) -> dict[str, Any]:
    times = {"ts": begin, "dur": max(0.0, end - begin)}
    return {"ph": "X", "pid": PROCESS, "tid": thread, "name": name, "cat": kind, **times, "args": facts}


def _memory(forecast: Forecast) -> Iterator[dict[str, Any]]:
    used = [kind for kind in KINDS if forecast.by_kind[kind].any()]
    for i, begin in enumerate(forecast.begins):
        sizes = {kind: int(forecast.by_kind[kind][i]) for kind in used}
        yield {"ph": "C", "pid": PROCESS, "name": "bytes on the device", "ts": begin, "args": sizes}
