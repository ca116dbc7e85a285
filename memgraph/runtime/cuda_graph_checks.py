"""Let a planned step be recorded, or say in words what is in the way.

    let_record(step, graph, recorder, insists=False)   ->   step.cuda_graphs, or a report with "not recorded: ..."

What a recording does is the device's work alone: see `passes/cuda_graph_memory.py` for what of a text is the host's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import fx

from passes import Trace
from passes.cuda_graph_memory import kept_nbytes, replay_obstacle

from ..errors import RecordingError
from ..graph.captured import Captured
from ..graph.nodes import all_storages, is_random, returned_values, storages, written_inputs
from .cuda_graphs import CudaGraphCache, Recorder
from .step import Step

RECORDED = "recorded from its third run on: forward and backward, a CUDA graph each"
WITHOUT = 'compile without cuda_graphs=, or with cuda_graphs="auto", which runs such a step op by op'


def refuse_recording(step: Step, graph: fx.Graph, recorder: Callable[[], Recorder], insists: bool) -> None:
    """Have the step recorded once it has run op by op, if nothing is in the way.

    Who `insists` has planned for what a recording keeps; of others the plan may have left too little.

    Raises:
        RecordingError: something is in the way of one who insists.
    """
    forecast = step.report.forecast
    why, kept = _in_the_way(step.captured, graph, forecast.trace), kept_nbytes(forecast.trace)
    if not why and not insists and forecast.peak + kept > step.report.budget:
        why = f"it would keep {kept} bytes more than the plan leaves of the budget"
    if why and insists:
        raise RecordingError(f"this step can't be recorded: {why}; {WITHOUT}")
    step.report = replace(step.report, recorded=f"not recorded: {why}" if why else RECORDED)
    if not why:
        step.cuda_graphs, step.insists, step.kept = CudaGraphCache(recorder), insists, kept if insists else 0


def _in_the_way(captured: Captured, graph: fx.Graph, trace: Trace) -> str:
    """Why the step can't be recorded; empty if it can."""
    if captured.updates or any(node.meta.get("phase") == "update" for node in graph.nodes):
        return "updates run in backward"
    if any(role.kind == "input_gradient" for role in captured.outputs):
        return "a gradient goes to what comes before the module"
    if "watched" in graph.output_node().meta["kinds"]:
        return "a hook, or a process group, is told of a gradient, or one is yet to be conjugated"
    if any(is_random(node) and any("val" not in read.meta for read in node.all_input_nodes) for node in graph.nodes):
        return "random numbers are drawn from a generator of the module's own"
    return _shared(captured, graph) or replay_obstacle(trace)


def _shared(captured: Captured, graph: fx.Graph) -> str:
    """What a copy of an input or of an output would not be."""
    placeholders = graph.find_nodes(op="placeholder")
    inputs = [node for node, role in zip(placeholders, captured.inputs, strict=False) if role.kind == "input"]
    theirs = all_storages(inputs)
    if any(not theirs.isdisjoint(storages(node)) for reader in graph.nodes for node in written_inputs(reader)):
        return "forward changes an input in place"
    handed = [
        node for role, node in zip(captured.outputs, returned_values(graph), strict=True) if role.kind == "output"
    ]
    held = [storage for node in {*handed, *placeholders} for storage in storages(node)]
    return "an output shares its memory with another, or with an input" if len(held) > len(set(held)) else ""
