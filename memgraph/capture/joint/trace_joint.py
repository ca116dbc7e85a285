"""Run a call once on fake tensors, forward and backward, and record every op.

    parameters, buffers, inputs, tangents -> forward ops, backward ops -> outputs, gradients, newly assigned buffers

The graph may still have in-place ops, which `functionalize` replaces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from ...graph.aten_shims import use_surrogates
from ...graph.captured import Ref
from ...graph.nodes import drop_aliases, drop_dead, returned_values
from ...guards.attribute_snapshot import AttributeSnapshot
from ...guards.attribute_writes import AttributeWrite
from ...guards.written_attributes import Attribute
from ...opaque.recorder import Recorder
from ...opaque.traced_parts import TracedParts
from ...tensors.loss_outputs import OutputSelector
from ...tensors.traced_number import ValueNeededError
from ..call.call import Call
from ..constant_fake_mode import ConstantFakeMode
from ..constants import describe_constants, refuse_trained_constants
from ..fake_tensors import make_fake
from ..python_state.side_effects import TraceRecord, changed_call_error, is_same_step, require_held, settled_writes
from ..python_state.watched_python import WatchedPython
from ..sizes.whole_slices import drop_whole_slices
from .eager_behavior import eager_behavior
from .joint_graph import JointGraph
from .traced_step import TracedStep


def trace_joint(
    call: Call, mode: ConstantFakeMode, wanted: OutputSelector, recorder: Recorder | None = None
) -> JointGraph:
    """Trace a call and, in grad mode, its backward from those differentiable outputs that `wanted` selects.

    Submodules whose calls were recorded are opaque.
    """
    with eager_behavior(call, mode) as before:
        traced = partial(_traced, mode=mode, wanted=wanted, recorder=recorder)
        step, graph = traced(call, before)
        if numbers := step.python.changed_numbers:
            step, graph = _counted(partial(traced, call, before), step, graph, numbers, before)
        require_held(before, step.python.writes, step.python.watch.read)

        def next_call(changing: Sequence[Any]) -> TraceRecord:
            later = call.holding(item.attribute for item in changing if item.holds_tensors)
            found = AttributeSnapshot(call.module, later.tensors, before.outer.ran)
            return _record(*traced(later, found, step.python.counted, [item.attribute for item in changing]))

        # Symbols are for a call whose trace at other lengths was made twice, and has to be the same as this one.
        trace_next = None if mode.sizes is not None else next_call
        writes = settled_writes(before, _record(step, graph), trace_next)
        reads = before.outer.ran.reads(before.outer.changes(step.python.after.outer))
    describe_constants(graph, mode)
    refuse_trained_constants(step.trained, call.module)
    return replace(step.joint_graph(graph), writes=writes, reads=reads)


def _counted(
    traced: Callable[[Sequence[AttributeWrite]], tuple[TracedStep, fx.GraphModule]],
    step: TracedStep,
    graph: fx.GraphModule,
    numbers: Sequence[AttributeWrite],
    before: AttributeSnapshot,
) -> tuple[TracedStep, fx.GraphModule]:
    """Trace a forward that counts again, with objects in place of the numbers, unless it needs the numbers."""
    own = [item for item in numbers if step.parts is not None and step.parts.own((item.where,))]
    if own:
        raise changed_call_error(own[0], before)  # they run before the numbers are counted
    try:
        counted, other = traced(numbers)
        is_same = is_same_step(_record(step, graph), _record(counted, other))
    except Exception:
        return step, graph
    if not is_same or counted.has_custom_functions:  # the backward of one may read the number
        return step, graph
    return counted, other


def _traced(
    call: Call, before: AttributeSnapshot, counted: Sequence[AttributeWrite] = (), tried: Iterable[Attribute] = (), *,
    mode: ConstantFakeMode, wanted: OutputSelector, recorder: Recorder | None,
) -> tuple[TracedStep, fx.GraphModule]:  # fmt: skip
    fakes = [make_fake(tensor, mode, role, mode.sizes) for role, tensor in zip(call.inputs, call.tensors, strict=True)]
    step = TracedStep(call, mode, wanted, WatchedPython(call.module, before, counted, tried))
    if recorder is not None:
        step.parts = TracedParts(recorder)
    with step.provenance.tracking(), mode.tracing():
        graph = make_fx(step, _disable_torch_fn_metadata_mode=True)(*fakes)
    if step.parts is not None:
        step.parts.refuse_outer_reads(before.outer.ran)
    if mode.sizes is not None:
        drop_whole_slices(graph.graph, mode)
    use_surrogates(graph.graph)
    drop_aliases(graph.graph, kept=set(returned_values(graph.graph)[: len(step.outputs)]))
    drop_dead(graph.graph)
    if step.numbers.has_escaped():
        raise ValueNeededError("forward stores a number that it reads from a tensor")
    return step, graph


def _record(step: TracedStep, graph: fx.GraphModule) -> TraceRecord:
    leaves = [leaf if isinstance(leaf, Ref) else (type(leaf), repr(leaf)) for leaf in step.leaves]
    facts = step.inputs, step.outputs, leaves, step.spec, step.differentiable, list(step.assigned)
    tensors = {id(ref): tensor for tensor, ref in step.stored}

    def fill(leaf: Any) -> Any:
        return tensors[id(leaf)] if isinstance(leaf, Ref) else leaf

    python = step.python
    return TraceRecord(graph, facts, python.after, python.writes, python.watch.read, fill, step.values)
