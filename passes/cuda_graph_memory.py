"""Let a step be noted down once, and done again without the host.

    x = input()                       kept = state()      # copies of x, of what comes to backward, of what is returned
    ...                        ->     x = input()
    return output y                   ...

A replay is what the device was asked to do, at the same addresses, and nothing of what the host does beside it.  Its
memory stays when the step has ended, also while the optimizer steps.
"""

from __future__ import annotations

from dataclasses import replace

from .ir.liveness import RELEASED
from .ir.ops import OFFLOAD, is_runtime, verb_of
from .ir.trace import Op, Storage, Trace

RECORDING = "kept_for_replays"
LIBRARIES = "libraries"  # what these keep on the device for themselves, for each of two threads
HOSTS = {  # what the host does in an op
    "rng_state": "random numbers are drawn a second time, for which the host sets the generator",
    "swap_rng": "random numbers are drawn a second time, for which the host sets the generator",
    "narrow": "the host may look at the range of what is cast",
    "reduce_scatter": "ranks exchange gradients in it",
    "gather": "ranks exchange parameters in it",
}


def explain_not_recordable(trace: Trace) -> str:
    """What of a planned step no replay does; empty if there is nothing."""
    for op in trace.ops:
        verb = verb_of(op.fn) if is_runtime(op.fn) else ""
        if verb in HOSTS:
            return HOSTS[verb]
        if op.fn == "gradient":
            return "it adds to gradients that are there"
        if op.offloaded:
            return "some of its state lives far"
    if any(trace.op[value].fn == OFFLOAD for _, value in trace.outputs):
        return "some of its state lives far"
    if sum(op.fn == "tangent" for op in trace.ops) > 1:
        return "gradients may come for some of its outputs and not for others"
    return ""


def recording_nbytes(trace: Trace) -> int:
    """The bytes that a step which is replayed has beside those of its plan: copies of what it is called with and of
    what comes to backward, copies of what it returns, what the update takes beside the step's memory, and what
    libraries keep for its own stream."""
    copied = sum(made.nbytes for op in trace.ops if op.fn in ("input", "tangent") for made in op.makes)
    libraries = sum(op.nbytes for op in trace.ops if op.name == LIBRARIES) // 2  # both halves are noted down by one
    handed = {held for kind, value in trace.outputs if kind in ("output", RELEASED) for held in trace.op[value].holds}
    update = max((op.workspace for op in trace.ops if op.phase == "update"), default=0)
    return copied + libraries + sum(trace.nbytes[held] for held in handed) + update


def add_recording_memory(trace: Trace) -> Trace:
    """The step with these bytes among what is there throughout."""
    kept = Op(
        RECORDING, "state", makes=(Storage(RECORDING, recording_nbytes(trace)),), holds=(RECORDING,), where="replays"
    )
    return replace(trace, ops=(kept, *trace.ops))
