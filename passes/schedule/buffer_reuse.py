"""Write the results of ops into the memory of dead values.

    a = aten.mm.default(x, w)      # 1 MiB, last read by b
    b = aten.gelu.default(a)
    c = aten.mm.default(b, v)      # 1 MiB, written into the memory of a    ->    {"c": "a"}

The first write to a page that the system has just given takes longer than a write to one that was used before. The dead
value stays on the device until then. So its memory is reused only where that raises no peak: neither that of forward
nor that of backward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import replace

from ..ir.arrays import Ints
from ..ir.liveness import Span, spans
from ..ir.trace import Op, Trace
from ..simulate.forecast import Forecast


def reused_buffers(forecast: Forecast, writable: Collection[str], smallest: int) -> dict[str, str]:
    """Return the dead value into whose memory each op writes, by the op's name.

    Args:
        writable: ops that can write their result into given memory.
        smallest: bytes of the smallest result that does so.
    """
    trace, total = forecast.trace, forecast.total.copy()
    shareable = _shareable(trace, smallest)
    reused: dict[str, str] = {}
    for half in (range(trace.boundary), range(trace.boundary, len(trace.ops))):
        limit = int(total[half.start : half.stop].max(initial=0))
        dead: defaultdict[tuple[str, int], list[tuple[str, int]]] = defaultdict(list)  # with the last op of each
        dies: defaultdict[int, list[str]] = defaultdict(list)
        for i in half:
            name = trace.ops[i].name
            if name in shareable:
                _, made, _, last = shareable[name]
                dies[last].append(name)
                if name in writable and (base := _taken(dead[_kind(shareable[name])], total, i, made.nbytes, limit)):
                    reused[name] = base
            for value in dies[i]:
                dead[_kind(shareable[value])].append((value, i))
    return reused


def with_buffer_reuse(trace: Trace, reused: Mapping[str, str]) -> Trace:
    """Return the trace in which ops write into the memory of these values."""
    memory: dict[str, str] = {}  # of each storage that is another's

    def rewritten(op: Op) -> Op:
        if op.name in reused:
            (base,) = trace.op[reused[op.name]].holds
            memory[op.makes[0].name] = memory.get(base, base)
        holds = tuple(dict.fromkeys(memory.get(storage, storage) for storage in op.holds))
        makes = tuple(made for made in op.makes if made.name not in memory)
        return op if holds == op.holds else replace(op, holds=holds, makes=makes)

    return replace(trace, ops=tuple(map(rewritten, trace.ops)))


def _shareable(trace: Trace, smallest: int) -> dict[str, Span]:
    """Return the spans of storages that only torch's ops see, by the op whose only result they are.

    The storages of a tuple have other names than its op, and can't be taken from it, not even a single one. Others may
    refer to a tensor that is dead in the trace: a copy to the tier, a collective, an opaque part, or an accumulation,
    whose result is the new gradient itself where `.grad` is None.
    """
    kept = trace.held_by(value for _, value in trace.outputs)
    for op in trace.ops:
        if not (_is_op_of_torch(op) or op.fn == "getitem"):
            kept |= trace.held_by((op.name, *op.reads))
    return {
        op.name: (op, made, first, last)
        for op, made, first, last in spans(trace)
        if made.nbytes >= smallest and op.holds == (op.name,) and op.name not in kept and _is_op_of_torch(op)
    }


def _is_op_of_torch(op: Op) -> bool:
    """Return True for an op that always returns tensors, and refers to none when it has ended."""
    return op.fn.startswith("aten.")


def _kind(span: Span) -> tuple[str, int]:
    """Return the type of a storage's numbers, and its bytes."""
    op, made, _, _ = span
    return op.type.partition("[")[0], made.nbytes


def _taken(dead: list[tuple[str, int]], total: Ints, index: int, nbytes: int, limit: int) -> str | None:
    """Take a dead value that may stay until an op, and count its bytes; the one that has died last, if there is one."""
    for place in reversed(range(len(dead))):
        value, last = dead[place]
        between = total[last + 1 : index]
        if between.max(initial=0) + nbytes <= limit:
            between += nbytes
            del dead[place]
            return value
    return None
