"""Turn a functional joint graph into the one that is planned and run.

    forward, backward                    ->  forward, copy_(buffer, its new value), backward
    outputs, gradients, new values       ->  outputs, gradients

Buffers are written in place, or once their old value is no longer read. An output is no view of an input. The gradient
of a parameter has its own storage, with the strides that autograd would give it. Unread nodes are dropped.

Assemble a `Captured` from a finalized graph and what the trace has found.

Draw coins before all other ops, so that a coin that falls otherwise costs no forward.

    y = linear(x)                        coin = memgraph_host::draw(...)
    coin = memgraph_host::draw(...)  ->  equal(lt(coin, 0.1), [False])
    equal(lt(coin, 0.1), [False])        y = linear(x)

Ops that read no input may run first, if each generator still draws in the same order.

Insert nodes where forward ends, or after the gradient that they copy.

mm = aten.mm(x, d)                       mm = aten.mm(x, d)
...                             ->       ...
add_ = copy_(steps, add)                 grad = clone(mm)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import compress, takewhile
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses import FakeTensorMode

from ..errors import CaptureError
from ..graph.captured import Captured, Input, Ref
from ..graph.draws.generator_states import device_of_state
from ..graph.draws.host_draws import DRAW
from ..graph.float_arguments import float_inputs
from ..graph.guard_ops import AGREE, value_guards
from ..graph.nodes import (
    UNGUARDED,
    all_storages,
    aten,
    changed_storages,
    drop_aliases,
    drop_copies,
    drop_dead,
    drop_identity_views,
    drop_unread_statistics,
    fake_result,
    is_guard,
    merge_constants,
    returned_values,
    storages,
    tensors,
)
from ..graph.number_ops import is_number
from ..graph.opaque_ops import FORWARD, with_parts
from ..graph.provenance import PROVENANCE, is_backward
from ..graph.summarize import draws, has_own_generator
from ..opaque.recorder import Recorder
from ..tensors.loss_outputs import OutputSelector, select_losses
from ..tensors.traced_number import is_traced
from .constants import drop_unread_constants
from .floats.float_inputs import FloatInputs
from .functionalize import FunctionalGraph
from .joint.joint_graph import JointGraph
from .reinplace import reinplace, reinplace_made
from .values.value_run import ValueRun

# A gradient that autograd passes on is "watched": it can't be offloaded.
RESULT_KINDS = {"output": "output", "gradient": "gradient", "input_gradient": "watched"}
PLAN_NAMES = re.compile(r"__(\d+|out|free|in_\d+|back|back_\d+|rng|swap)$")  # names that a plan adds
HOST = "random and numpy"
MAX_NUMEL = 1 << 16  # larger values would take memory from the start


def finalize_graph(functional: FunctionalGraph, joint: JointGraph) -> fx.GraphModule:
    """Return the graph whose placeholders are `joint.inputs` and whose results are `joint.outputs`."""
    graph = functional.graph.graph
    outputs = [role.kind == "output" for role in joint.outputs]
    graph.output_node().args = ((*functional.results, *functional.changed.values()),)
    visible = set(compress(functional.results, outputs))
    drop_aliases(graph, kept=visible)
    drop_identity_views(graph, kept=visible)
    merge_constants(graph)
    drop_unread_statistics(graph)
    writer = GraphWriter(graph, joint.mode)
    writer.copy_overwritten_reads({place: joint.inputs[place].label for place in functional.changed})
    results, new = returned_values(graph)[: len(outputs)], returned_values(graph)[len(outputs) :]
    results = [
        writer.copy_if_view_of_input(node) if output else node for node, output in zip(results, outputs, strict=True)
    ]
    writer.write_back(functional.changed, new)
    owners = {("gradient", role.name): node for role, node in zip(joint.inputs, writer.placeholders, strict=True)}
    results = writer.copy_unlike_owner(results, [owners.get((role.kind, role.name)) for role in joint.outputs])
    graph.output_node().args = (tuple(results),)
    graph.output_node().meta["kinds"] = tuple(RESULT_KINDS[role.kind] for role in joint.outputs)
    places = [place for place in functional.changed if joint.inputs[place].kind == "buffer"]
    assigned = {writer.placeholders[place] for place in joint.assigned}
    draw_coins_first(graph, set(filter(is_guard, graph.nodes)))
    buffers = [writer.placeholders[place] for place in places]
    reinplace(graph, joint.mode, buffers, assigned, after=writer.agree_on_guards(FORWARD))
    reinplace_made(graph, joint.mode)
    drop_copies(graph)
    drop_dead(graph)
    _label(graph, joint.inputs)
    drop_unread_constants(functional.graph)
    graph.lint()
    functional.graph.recompile()
    return functional.graph


def _label(graph: fx.Graph, inputs: Iterable[Input]) -> None:
    """Give placeholders readable names, and keep the meta of nodes that the rest of memgraph reads."""
    changed = changed_storages(graph)
    for node, role in zip(graph.find_nodes(op="placeholder"), inputs, strict=True):
        name = role.name or f"{role.kind}_{role.index}"
        node._rename(re.sub(r"\W", "_", name))
        node.target = node.name
        # A parameter that forward writes to counts as a buffer: only what is never written can be streamed.
        is_written = role.kind == "parameter" and not changed.isdisjoint(storages(node))
        kind = "buffer" if is_written else role.kind
        node.meta = {"kind": kind, "val": node.meta["val"], PROVENANCE: {"phase": "forward", "where": name}}
    for node in graph.nodes:
        if PLAN_NAMES.search(node.name):
            node._rename(f"{node.name}_")
        if node.op != "output":
            provenance = node.meta.get(PROVENANCE, {"phase": "forward", "where": ""})
            kept = {key: node.meta[key] for key in ("val", "kind") if key in node.meta}
            node.meta = kept | {key: provenance[key] for key in ("phase", "where", "part") if key in provenance}
        if node.op == "get_attr":  # in front of all ops, though backward alone may read it
            node.meta["phase"] = "forward"


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


def draw_coins_first(graph: fx.Graph, guards: set[fx.Node]) -> None:
    """Move guards that no input affects to the beginning, with all that they are computed from."""
    movable: dict[fx.Node, None] = {}
    kept: set[str] = set()  # generators from which an op draws that stays where it is
    for node in graph.nodes:
        if node.target is FORWARD:  # it may draw from any generator
            break
        generator, reads = _generator(node), node.all_input_nodes
        draws_first = bool(generator) and generator not in kept and not reads
        computes = not generator and bool(reads) and all(read in movable for read in reads)
        if (draws_first or computes) and node.op == "call_function" and _is_small(node):
            movable[node] = None
        elif generator:
            kept.add(generator)
    needed = _read_by([node for node in movable if node in guards])
    generators: set[str] = set()  # those of later draws that move
    moved = []
    for node in reversed(movable):
        if node in needed or _generator(node) in generators:
            moved.append(node)
            generators |= {_generator(node)} - {""}
    placeholders = graph.find_nodes(op="placeholder")
    for node in moved if placeholders else ():
        placeholders[-1].append(node)


def _generator(node: fx.Node) -> str:
    """Return the name of the generator from which an op draws; empty if it draws none."""
    if device := device_of_state(node):
        return device
    if node.target is DRAW:
        return HOST
    if has_own_generator(node):
        return "a module's own"
    values = tensors(node) if node.op == "call_function" and draws(node) else []
    return str(values[0].device) if values else ""


def _is_small(node: fx.Node) -> bool:
    return sum(value.numel() for value in tensors(node)) <= MAX_NUMEL


def _read_by(nodes: list[fx.Node]) -> set[fx.Node]:
    """Return these nodes and all that they are computed from."""
    found: set[fx.Node] = set()
    while nodes:
        node = nodes.pop()
        if node not in found:
            found.add(node)
            nodes += node.all_input_nodes
    return found


class GraphWriter:
    """Inserts nodes and runs each on fake tensors. `boundary` is the first node of backward."""

    def __init__(self, graph: fx.Graph, mode: FakeTensorMode) -> None:
        self.graph, self.mode = graph, mode
        self.placeholders = graph.find_nodes(op="placeholder")
        self.boundary = next((node for node in graph.nodes if is_backward(node)), graph.output_node())

    def copy_overwritten_reads(self, changed: dict[int, str]) -> None:
        """Let readers of an old value read a copy if it is overwritten by then; `changed` labels placeholders."""
        labels = {storage: label for place, label in changed.items() for storage in storages(self.placeholders[place])}
        for node in self._forward_nodes():
            late = {user for user in node.users if user.op == "output" or is_backward(user)}
            overwritten = storages(node) & labels.keys()
            if late and overwritten:
                if not isinstance(node.meta["val"], Tensor) or node_order(node.meta["val"]) is None:
                    label = labels[min(overwritten)]
                    raise CaptureError(f"forward changes {label} while part of its old value is still needed: clone it")
                copy = self._copy(node, node.meta["val"], self.boundary, "forward")
                node.replace_all_uses_with(copy, delete_user_cb=late.__contains__)
        for node in self.graph.nodes:
            if is_backward(node) and storages(node) & labels.keys():
                node.meta["val"] = fake_result(node, self.mode)

    def agree_on_guards(self, checking: OpOverload) -> fx.Node | None:
        """Let ranks agree that all guards, and ops `checking`, have held, behind the last of them; return that node, if
        there are any."""
        last = next(
            (node for node in reversed(self._forward_nodes()) if is_guard(node) or node.target is checking), None
        )
        if last is None:
            return None
        read = last.all_input_nodes[0]
        tensor = read.args[0] if is_number(read) else read
        return self._add(last, last.next, "forward", AGREE, tensor, guard=UNGUARDED)

    def copy_if_view_of_input(self, node: fx.Node) -> fx.Node:
        """Return the node, or a copy if it is a view of an input or of a constant."""
        inputs = all_storages([*self.placeholders, *self.graph.find_nodes(op="get_attr")])
        return self._copy(node, node.meta["val"], self.boundary, "forward") if storages(node) & inputs else node

    def write_back(self, changed: Iterable[int], new: Iterable[fx.Node]) -> None:
        """Copy new values into the inputs that the module changed."""
        for place, value in zip(changed, new, strict=True):
            self._add(value, self.boundary, "forward", aten.copy_.default, self.placeholders[place], value)

    def copy_unlike_owner(self, results: list[fx.Node], owners: list[fx.Node | None]) -> list[fx.Node]:
        """Copy gradients that share or don't fill their storage, or have other strides than their owner."""
        taken = all_storages(self._forward_nodes())
        taken |= all_storages(node for node, owner in zip(results, owners, strict=True) if owner is None)
        copied = []
        for node, owner in zip(results, owners, strict=True):
            if owner is not None:
                if storages(node) & taken or not _has_grad_layout(node.meta["val"], owner.meta["val"]):
                    before = node.next if is_backward(node) else self.boundary
                    node = self._copy(node, owner.meta["val"], before, "backward")
                taken |= storages(node)
            copied.append(node)
        return copied

    def _forward_nodes(self) -> list[fx.Node]:
        return list(takewhile(lambda node: node is not self.boundary, self.graph.nodes))

    def _copy(self, node: fx.Node, like: Tensor, before: fx.Node, phase: str) -> fx.Node:
        """Copy a value densely, with the order of dimensions that `like` has in memory."""
        order = node_order(like) or list(range(like.dim()))
        is_permuted = order != sorted(order)
        if is_permuted:
            node = self._add(node, before, phase, aten.permute.default, node, order)
        node = self._add(node, before, phase, aten.clone.default, node, memory_format=torch.contiguous_format)
        if is_permuted:
            back = sorted(range(len(order)), key=order.__getitem__)
            node = self._add(node, before, phase, aten.permute.default, node, back)
        return node

    def _add(
        self, source: fx.Node, before: fx.Node, phase: str, target: OpOverload, *args: Any, **kwargs: Any
    ) -> fx.Node:
        with self.graph.inserting_before(before):
            node = self.graph.call_function(target, args, kwargs)
        node.meta[PROVENANCE] = {"where": source.meta.get(PROVENANCE, {}).get("where", ""), "phase": phase}
        node.meta["val"] = fake_result(node, self.mode)
        return node


def node_order(tensor: Tensor) -> list[int] | None:
    """Return the dimensions from outermost to innermost in memory; None if there are gaps or overlaps."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    long = [d for d in order if tensor.shape[d] != 1]
    step = 1
    for d in reversed(long):
        if tensor.stride(d) != step and tensor.numel():
            return None
        step *= tensor.shape[d]
    return list(range(tensor.dim())) if long == sorted(long) else order


def _has_grad_layout(gradient: Tensor, owner: Tensor) -> bool:
    """Return True if a gradient fills its storage, with the strides of autograd's AccumulateGrad."""
    fills_storage = gradient.untyped_storage().nbytes() == gradient.numel() * gradient.element_size()
    order = node_order(owner) or list(range(owner.dim()))
    return fills_storage and gradient.permute(order).is_contiguous()
