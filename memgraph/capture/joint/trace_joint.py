"""Run a call once on fake tensors, forward and backward, and record every op.

    parameters, buffers, inputs, tangents -> forward ops, backward ops -> outputs, gradients, newly assigned buffers

The graph may still have in-place ops, which `functionalize` replaces.

Drop slices that take the whole dimension, as eager does.

    s = slice(x, 1, 0, max)                        mul(x, y)
    mul(s, y)                               ->     ...
    g = slice_backward(d, [8, n], 1, 0, max, 1)    d, where g was

Python's `x[:, 0:]` makes no op if that is all of `x`; where the size is a symbol, torch does not look.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from ...graph.aten_shims import use_surrogates
from ...graph.captured import Ref
from ...graph.nodes import (
    allocates_nothing,
    aten,
    drop_aliases,
    drop_dead,
    fake_result,
    has_same_strides,
    returned_values,
)
from ...guards.attribute_snapshot import AttributeSnapshot
from ...guards.attribute_writes import AttributeWrite
from ...guards.written_attributes import Attribute
from ...opaque.recorder import Recorder
from ...opaque.traced_parts import TracedParts
from ...tensors.loss_outputs import OutputSelector
from ...tensors.traced_number import ValueNeededError
from ...tensors.traced_size import SizeArgument, always_equal
from ..call.call import Call
from ..constant_fake_mode import ConstantFakeMode
from ..constants import describe_constants, refuse_trained_constants
from ..fake_tensors import make_fake
from ..python_state.side_effects import TraceRecord, changed_call_error, is_same_step, require_held, settled_writes
from ..python_state.watched_python import WatchedPython
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
            return _record(*traced(later, found, step.python.counters, [item.attribute for item in changing]))

        # Symbols are for a call whose trace at other lengths was made twice, and has to be the same as this one.
        trace_next = None if mode.sizes is not None else next_call
        writes = settled_writes(before, _record(step, graph), trace_next, mode.sizes is not None or mode.has_floats)
        reads = before.outer.ran.reads({write.attribute.key for write in writes.items})
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


def drop_whole_slices(graph: fx.Graph, mode: FakeTensorMode) -> None:
    """Let users of a whole slice, and of its gradient, read what was sliced."""
    views = {node for node in graph.nodes if node.op == "call_function" and allocates_nothing(node)}
    moved = set[fx.Node]()
    for node in list(graph.nodes):
        if node in moved or (node in views and not moved.isdisjoint(node.all_input_nodes)):
            node.meta["val"] = fake_result(node, mode)
            moved.add(node)
        if node.target not in (aten.slice.Tensor, aten.slice_backward.default):
            continue
        source, begin = node.args[0], 2 if node.target is aten.slice.Tensor else 3
        bounds: list[Any] = [*node.args[begin:]]
        start, end, step = bounds + [0, None, 1][len(bounds) :]
        is_whole = has_same_strides(node.meta["val"], source.meta["val"])
        if start == 0 and step == 1 and is_whole and _is_open(end, node, begin):
            moved |= node.users.keys() & views if node not in views else set()
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def _is_open(end: object, node: fx.Node, begin: int) -> bool:
    """Return True if a slice ends where the dimension does, whatever its length."""
    length = node.meta["val"].shape[node.args[begin - 1]]
    if isinstance(end, SizeArgument):
        return always_equal([end.size], [length])
    return end is None or end > 1 << 62  # type: ignore[operator]
