"""Names of the runtime ops that a plan adds to a step."""

from __future__ import annotations

from .trace import Op, Trace, type_nbytes

REDUCE_SCATTER = "memgraph.reduce_scatter.default"
REDUCED = "memgraph.reduced.default"

GATHER = "memgraph.gather.default"


GATHERED = "memgraph.gathered.default"


GATHER_ROOM = "memgraph.room.default"


def gathered_by(trace: Trace) -> dict[str, set[str]]:
    """For each op that waits for a gather the storages that are whole then, as far as that gather is concerned."""
    return {
        op.name: {held for read in trace.op[op.reads[0]].reads for held in trace.op[read].holds}
        for op in trace.ops
        if op.fn == GATHERED
    }


def sent_nbytes(trace: Trace, op: Op) -> int:
    """The bytes of the whole bucket that an exchange or a gather is about."""
    return type_nbytes(op.type) if op.fn == GATHER else trace.nbytes[trace.op[op.reads[0]].holds[0]]
