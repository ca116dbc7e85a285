"""Check whether a planned step can be recorded as CUDA graphs.

    check_recording(captured, graph, forecast, budget, ...)   ->   a Recording, whose note says "not recorded: ..."

A recording repeats only what the device does; `passes/cuda_graph_memory.py` says which ops need the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from passes import Forecast, Trace
from passes.cuda_graph_memory import explain_not_recordable, recording_nbytes

from ..errors import RecordingError
from ..graph.captured import Captured
from ..graph.draws.generator_states import device_of_state
from ..graph.draws.host_draws import draws_on_host
from ..graph.nodes import GUARDS, all_storages, is_random, returned_values, storages, tensors, written_inputs
from .cuda_graphs import CudaGraphCache, Recorder

RECORDED = "recorded from its third run on: forward and backward, a CUDA graph each"
WITHOUT = 'compile without cuda_graphs=, or with cuda_graphs="auto", which runs such a step op by op'


@dataclass(frozen=True, eq=False)
class Recording:
    """The decision whether a step is recorded.

    Attributes:
        cache: makes and keeps the recording; None if the step runs op by op.
        is_required: a recording that fails is an error.
        kept_nbytes: bytes that the plan counts for a recording, and that do not exist before it is made.
        note: for the report.
    """

    cache: CudaGraphCache | None = None
    is_required: bool = False
    kept_nbytes: int = 0
    note: str = ""


NOT_RECORDED = Recording()


def check_recording(
    captured: Captured, graph: fx.Graph, forecast: Forecast, budget: int, recorder: Callable[[], Recorder],
    is_required: bool,
) -> Recording:  # fmt: skip
    """Return a recording of the step, if it can be recorded.

    A required recording was planned for; otherwise the plan may leave too little memory for it.

    Raises:
        RecordingError: a required recording is impossible.
    """
    reason, kept = _reason_against(captured, graph, forecast.trace), recording_nbytes(forecast.trace)
    if not reason and not is_required and forecast.peak + kept > budget:
        reason = f"it would keep {kept} bytes more than the plan leaves of the budget"
    if reason and is_required:
        raise RecordingError(f"this step can't be recorded: {reason}; {WITHOUT}")
    if reason:
        return Recording(note=f"not recorded: {reason}")
    return Recording(CudaGraphCache(recorder), is_required, kept if is_required else 0, RECORDED)


def _reason_against(captured: Captured, graph: fx.Graph, trace: Trace) -> str:
    """Return why the step can't be recorded; empty if it can."""
    if captured.updates or any(node.meta.get("phase") == "update" for node in graph.nodes):
        return "updates run in backward"
    if captured.opaque:
        return f"{captured.opaque[0].path} runs as it is, in Python"
    if any(role.kind == "input_gradient" for role in captured.outputs):
        return "a gradient goes to what comes before the module"
    if "watched" in graph.output_node().meta["kinds"]:
        return "a hook or a process group sees a gradient, or one is lazily conjugated"
    if any(is_random(node) and any("val" not in read.meta for read in node.all_input_nodes) for node in graph.nodes):
        return "random numbers are drawn from a generator of the module's own"
    if any(map(device_of_state, graph.nodes)):
        return "the state of a random generator is read or set in it"
    if draws_on_host(graph):
        return "random numbers are drawn with `random` or numpy"
    if any(getattr(node.target, "namespace", "") == GUARDS for node in graph.nodes):
        return "Python reads values of tensors in it"
    return _on_host(graph) or _shared_memory(captured, graph) or explain_not_recordable(trace)


def _on_host(graph: fx.Graph) -> str:
    """Return why values in the host's memory would differ in a replay; empty if there are none in a step on a GPU.

    A kernel takes a number as it is when it is recorded, and a copy of a larger value reads memory that is freed later.
    """
    known = [*graph.find_nodes(op="placeholder"), *graph.find_nodes(op="get_attr")]
    kinds = {value.device.type for node in known for value in tensors(node)}
    if len(kinds) < 2 or "cpu" not in kinds:
        return ""
    node = next(node for node in known for value in tensors(node) if value.device.type == "cpu")
    return f"the {node.meta.get('kind', 'constant')} {node.target} lies in the host's memory"


def _shared_memory(captured: Captured, graph: fx.Graph) -> str:
    """Return why copies of inputs and outputs would differ from the originals; empty if they would not."""
    placeholders = graph.find_nodes(op="placeholder")
    inputs = [node for node, role in zip(placeholders, captured.inputs, strict=False) if role.kind == "input"]
    input_storages = all_storages(inputs)
    if any(not input_storages.isdisjoint(storages(node)) for op in graph.nodes for node in written_inputs(op)):
        return "forward changes an input in place"
    returned = [
        node for role, node in zip(captured.outputs, returned_values(graph), strict=True) if role.kind == "output"
    ]
    all_of_them = [storage for node in {*returned, *placeholders} for storage in storages(node)]
    is_shared = len(all_of_them) > len(set(all_of_them))
    return "an output shares its memory with another, or with an input" if is_shared else ""
