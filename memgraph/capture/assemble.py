"""Assemble a `Captured` from a finalized graph and what the trace has found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, fx

from ..graph.captured import Captured, Ref
from ..graph.float_arguments import float_inputs
from ..graph.guard_ops import value_guards
from ..graph.nodes import returned_values
from ..graph.opaque_ops import with_parts
from ..opaque.recorder import Recorder
from ..tensors.loss_outputs import OutputSelector, select_losses
from ..tensors.traced_number import is_traced
from .floats.float_inputs import FloatInputs
from .joint.joint_graph import JointGraph
from .values.value_run import ValueRun


def assemble(joint: JointGraph, graph: fx.GraphModule, wanted: OutputSelector) -> Captured:
    """Return the captured step of a graph; `joint` has the roles of its placeholders and results."""
    tangents = tuple(role.index for role in joint.inputs if role.kind == "tangent")
    speculative = _speculative_outputs(graph, tangents) if wanted is select_losses else ()
    return Captured(
        graph, joint.inputs, joint.outputs, joint.leaves, joint.spec, joint.differentiable, tangents, speculative,
        sources=joint.sources, has_custom_functions=joint.has_custom_functions, rewritten=joint.rewritten,
        writes=joint.writes, reads=joint.reads,
    )  # fmt: skip


def with_guards(
    captured: Captured, values: ValueRun | None, recorder: Recorder | None, given: Iterable[Tensor]
) -> Captured:  # fmt: skip
    """Add the guards of a graph for which forward has run once on `given` tensors, and its opaque parts."""
    parts = tuple(recorded.part for recorded in recorder.calls) if recorder is not None else ()
    guards = with_parts(value_guards(captured.graph.graph), parts)
    nbytes = max(
        values.nbytes if values is not None else 0, recorder.backward_nbytes(given) if recorder is not None else 0
    )
    return replace(captured, guards=guards, opaque=parts, value_run_nbytes=nbytes)


def with_floats(captured: Captured, floats: FloatInputs) -> Captured:
    """Add the floats of the call that ops read or attributes get, and values for which the graph would be another."""
    inputs = [*float_inputs(captured.graph.graph)]

    def leaf(value: Any) -> Any:
        if not is_traced(value):
            return value
        inputs.append(value.node)
        return Ref("float", len(inputs) - 1)

    writes, special_values = captured.writes.at(leaf), tuple(floats.trace.special_values)
    return replace(captured, floats=tuple(inputs), special_values=special_values, writes=writes)


def _speculative_outputs(graph: fx.GraphModule, tangents: Sequence[int]) -> tuple[int, ...]:
    outputs = returned_values(graph.graph)
    scalars = {place for place in tangents if outputs[place].meta["val"].numel() == 1}
    return tuple(place for place in tangents if place not in scalars) if scalars else ()
