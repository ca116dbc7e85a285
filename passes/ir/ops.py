"""The ops that run only because of a plan, a group of ranks or a compiler: what they are called, and their values.

offload_name("a")    ->  "a__out"       of a__out = memgraph.offload.default(a)
reload_name("a", 2)  ->  "a__in_2"      of the second reload of a;  value_of("a__in_2") -> "a"
"""

from __future__ import annotations

import re

from .trace import Op, Trace, type_nbytes

PREFIX = "memgraph."

OFFLOAD = "memgraph.offload.default"  # begins the copy to the tier
FREE = "memgraph.free.default"  # waits for it, and frees the value on the device
RELOAD = "memgraph.reload.default"  # begins the copy from the tier
WAIT = "memgraph.wait.default"  # waits for it
NARROW = "memgraph.narrow.default"  # casts a value before it is offloaded
WIDEN = "memgraph.widen.default"  # casts it after it was reloaded
RNG_STATE = "memgraph.rng_state.default"  # notes the generator's state before an op draws random numbers
SWAP_RNG = "memgraph.swap_rng.default"  # exchanges the state for another one, around the recomputed op

REDUCE_SCATTER = "memgraph.reduce_scatter.default"  # begins the reduction of a bucket of gradients
REDUCED = "memgraph.reduced.default"  # waits for it
GATHER = "memgraph.gather.default"  # begins the all-gather of a bucket of parameters
GATHERED = "memgraph.gathered.default"  # waits for it
GATHER_ROOM = "memgraph.room.default"  # allocates the buffer of a packed bucket
PACK_PART = "memgraph_oss.piece.default"  # copies a part of a gradient into its bucket, so that the rest may be freed
PACK = "memgraph_oss.pack.default"

ACCUMULATE = "memgraph.accumulate"  # adds a gradient to the one that is there
SEGMENT = "memgraph.segment"  # runs neighbouring ops that are compiled into one

REGION = "_region"  # ends the name of a segment of all ops between two that stay outside

SUFFIX = re.compile(r"__(?:rng|wire|out|free|in_\d+|back_\d+|wide_\d+)$")


def is_runtime(fn: str) -> bool:
    """Return True for the ops of memgraph itself."""
    return fn.startswith(PREFIX)


def is_region(op: Op) -> bool:
    """Return True for a segment of all ops between two that stay outside, memory ops for instance."""
    return op.fn == SEGMENT and op.name.endswith(REGION)


def verb_of(fn: str) -> str:
    """Return the verb of such an op: "reload" of "memgraph.reload.default"."""
    return fn.split(".")[1]


def recompute_name(value: str, count: int) -> str:
    return f"{value}__{count}"


def rng_name(value: str) -> str:
    return f"{value}__rng"


def swap_names(recomputed: str) -> tuple[str, str]:
    """Return the names of the exchanges of the generator's state, before a recomputed op and after it."""
    return f"{recomputed}__swap", f"{recomputed}__back"


def narrow_name(value: str) -> str:
    return f"{value}__wire"


def offload_name(value: str) -> str:
    return f"{value}__out"


def free_name(value: str) -> str:
    return f"{value}__free"


def reload_name(value: str, count: int) -> str:
    return f"{value}__in_{count}"


def wait_name(value: str, count: int) -> str:
    return f"{value}__back_{count}"


def widen_name(value: str, count: int) -> str:
    return f"{value}__wide_{count}"


def value_of(name: str) -> str:
    """Return the captured value that a line with one of these names is about."""
    return SUFFIX.sub("", name)


def gathered_by(trace: Trace) -> dict[str, set[str]]:
    """For each op that waits for a gather the storages that are whole then, as far as that gather is concerned."""
    return {op.name: trace.held_by(trace.op[op.reads[0]].reads) for op in trace.ops if op.fn == GATHERED}


def sent_nbytes(trace: Trace, op: Op) -> int:
    """The bytes of the whole bucket that an exchange or a gather is about."""
    return type_nbytes(op.type) if op.fn == GATHER else trace.nbytes[trace.op[op.reads[0]].holds[0]]
