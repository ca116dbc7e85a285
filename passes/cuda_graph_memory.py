"""Count the memory of a step that is recorded as CUDA graphs, and explain why a step can't be.

    x = input()                       kept = state()      # copies of x, of tangents, and of outputs
    ...                        ->     x = input()
    return output y                   ...

A replay runs the recorded kernels at the same addresses, and nothing that the host does beside them.  Its memory stays
allocated when the step has ended, also while the optimizer steps.
"""

from __future__ import annotations

from dataclasses import replace

from .ir.liveness import RELEASED
from .ir.ops import GATHER, NARROW, OFFLOAD, REDUCE_SCATTER, RNG_STATE, SWAP_RNG
from .ir.trace import Op, Storage, Trace

RECORDING = "kept_for_replays"
LIBRARIES = "libraries"  # the memory that libraries keep on the device, for each of two threads
ON_HOST = {  # what the host does in an op
    RNG_STATE: "the host sets the generator to draw random numbers a second time",
    SWAP_RNG: "the host sets the generator to draw random numbers a second time",
    NARROW: "the host may check the range of a value that is cast",
    REDUCE_SCATTER: "ranks exchange gradients in it",
    GATHER: "ranks exchange parameters in it",
}


def explain_not_recordable(trace: Trace) -> str:
    """Return what a replay of a planned step could not do; empty if there is nothing."""
    for op in trace.ops:
        if op.fn in ON_HOST:
            return ON_HOST[op.fn]
        if op.fn == "gradient":
            return "it adds to gradients that exist already"
        if op.offloaded:
            return "some of its state is offloaded"
    if any(trace.op[value].fn == OFFLOAD for _, value in trace.outputs):
        return "some of its state is offloaded"
    if sum(op.fn == "tangent" for op in trace.ops) > 1:
        return "gradients may come for some of its outputs and not for others"
    return ""


def recording_nbytes(trace: Trace) -> int:
    """Return the bytes of a recorded step beside those of its plan.

    These are copies of inputs, tangents and outputs, the workspace of the update, and the memory of libraries for
    the stream of the recording, in each of the two threads.
    """
    copied = sum(made.nbytes for op in trace.ops if op.fn in ("input", "tangent") for made in op.makes)
    libraries = sum(op.nbytes for op in trace.ops if op.name == LIBRARIES)  # each half is recorded in its own thread
    returned = trace.held_by(value for kind, value in trace.outputs if kind in ("output", RELEASED))
    update = max((op.workspace for op in trace.ops if op.phase == "update"), default=0)
    return copied + libraries + sum(trace.nbytes[held] for held in returned) + update


def add_recording_memory(trace: Trace) -> Trace:
    """Return the step with these bytes as one more input."""
    kept = Op(
        RECORDING, "state", makes=(Storage(RECORDING, recording_nbytes(trace)),), holds=(RECORDING,), where="replays"
    )
    return replace(trace, ops=(kept, *trace.ops))
