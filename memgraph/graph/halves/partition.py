"""Partition a joint graph into one GraphModule for forward and one for backward.

    joint:     forward ops, backward ops
    forward:   inputs, floats                     -> outputs, what backward reads
    backward:  what it reads, floats, tangents    -> gradients

Both take a list and empty it, and release every value at its last use. For a loss of only some outputs, the gradients
of the others are dropped from backward:

    d = mm(tangent_0, w)                         d = mm(tangent_0, w)
    e = mul(tangent_1, inf)                      e = mul(tangent_1, inf)      # of zeros, and never read
    g = add(d, e)                       ->       g = copy(d)
    h = cat([d, e])                              h = cat([d, zeros like e])

Autograd does the same. Zeros in place of such a tangent would not do: 0 x inf is NaN. No op takes more memory. The copy
has the strides of `d`, as in autograd, or those of `g` where an op behind it could not take them.

The layouts that values of backward have where a sum is left with one of its terms.

s = add(tangent, d);  t = view(s)   ->   s = d in its own strides, as autograd has it;  t = view of these
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree
from torch.utils._pytree import tree_map_only

from passes.ir.liveness import RELEASED

from ...tensors.layout import is_dense
from ...tensors.traced_number import FloatArgument, NumberNode
from ..aten_shims import COPY_WITH_STRIDES
from ..inductor import expand_segments
from ..nodes import all_storages, is_sum, named_placeholder, returned_values, storages, written_inputs
from ..ops import accumulate
from ..summarize import PURE_WHEN_RERUN
from .direct_calls import DirectCode

INPUTS_OF_BACKWARD = ("tangent", "gradient")


@dataclass(frozen=True, eq=False)
class Partition:
    """The two modules. Backward takes what forward returns after its outputs, then floats, tangents and gradients."""

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    tangents: tuple[Tensor, ...] = ()  # fake: the shapes and strides that backward was captured with
    tangent_names: tuple[str, ...] = ()
    # Positions, among inputs and then outputs, of the caller's tensors that backward reads.
    caller_values: tuple[int, ...] = ()
    written: tuple[int, ...] = ()  # positions, among what is saved, of what backward writes to


def partition(graph: fx.Graph, root: torch.nn.Module, floats: Sequence[NumberNode] = ()) -> Partition:
    """Partition a joint graph by `meta["phase"]`.

    Args:
        floats: those that both modules take.
    """
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    given = [node for node in inputs if node.meta["kind"] in INPUTS_OF_BACKWARD]
    late = {node for node in graph.nodes if node.meta.get("phase") in ("backward", "update")}
    results = tuple(zip(graph.output_node().meta["kinds"], returned_values(graph), strict=True))
    outputs = [node for kind, node in results if kind in ("output", RELEASED)]
    gradients = [node for kind, node in results if kind not in ("output", RELEASED)]
    read = dict.fromkeys(source for node in graph.nodes if node in late for source in node.all_input_nodes)
    read |= dict.fromkeys(gradients)
    saved = tuple(node for node in read if node not in late and node not in given and node.op != "get_attr")
    first = [node for node in inputs if node not in given]
    forward = _module(graph, root, first, [*outputs, *saved], lambda node: node not in late, floats)
    if not gradients and not late:
        return Partition(forward, None)
    tangents = [node for node in given if node.meta["kind"] == "tangent"]
    fakes, names = tuple(node.meta["val"] for node in tangents), tuple(node.name for node in tangents)
    backward = _module(graph, root, saved, gradients, late.__contains__, floats, given)
    kept = all_storages(node for node in saved if not _is_unread(node, late.intersection(node.users)))
    caller_values = tuple(i for i, node in enumerate([*first, *outputs]) if not kept.isdisjoint(storages(node)))
    changed = all_storages(source for node in late for source in written_inputs(node))
    written = tuple(i for i, node in enumerate(saved) if not changed.isdisjoint(storages(node)))
    return Partition(forward, backward, fakes, names, caller_values, written)


def _is_unread(node: fx.Node, readers: Collection[fx.Node]) -> bool:
    """Return True if recomputed ops take running statistics only to update them, which has no effect a second time.

    The next forward may have changed them before this backward, as in eager.
    """
    return bool(readers) and all(
        user.target in PURE_WHEN_RERUN and node in user.args[3:5] and node not in user.args[:3] for user in readers
    )


def _module(
    graph: fx.Graph,
    root: torch.nn.Module,
    inputs: Iterable[fx.Node],
    outputs: Iterable[fx.Node],
    belongs: Callable[[fx.Node], bool],
    floats: Sequence[NumberNode],
    last: Iterable[fx.Node] = (),
) -> fx.GraphModule:
    """Return the nodes of `graph` that satisfy `belongs`, as a module from `inputs`, `floats` and the `last` inputs to
    `outputs`."""
    part = fx.Graph()
    part.set_codegen(DirectCode())
    env: dict[fx.Node, fx.Node] = {}

    def add_inputs(nodes: Iterable[fx.Node]) -> None:
        for node in nodes:
            env[node] = named_placeholder(part, node.name)
            env[node].meta = dict(node.meta)

    add_inputs(inputs)
    float_placeholders = {node: part.placeholder(f"float__in_{i}") for i, node in enumerate(floats)}
    add_inputs(last)
    for node in graph.nodes:
        if node not in env and (node.op == "get_attr" or (node.op == "call_function" and belongs(node))):
            env[node] = part.node_copy(node, env.__getitem__)
            if float_placeholders:
                _read_placeholders(env[node], float_placeholders)
    part.output(tuple(env[node] for node in outputs))
    return fx.GraphModule(root, part)


def _read_placeholders(node: fx.Node, placeholders: Mapping[NumberNode, fx.Node]) -> None:
    """Let a node read placeholders instead of the floats at capture."""
    node.args, node.kwargs = tree_map_only(
        FloatArgument, lambda argument: placeholders[argument.node], (node.args, dict(node.kwargs))
    )


def drop_unused(half: fx.GraphModule, tangents: Sequence[str], unused: Collection[int]) -> fx.GraphModule:
    """Return the backward module without the tangents at the `unused` positions.

    `tangents` are input names. All inputs after them are gradients to add to.
    """
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.set_codegen(type(half.graph._codegen)())
    graph.output(graph.graph_copy(half.graph, copies))
    expand_segments(graph)  # some of a segment's ops may be dropped
    dropped = _unused_nodes(graph, tangents, {tangents[i] for i in unused})
    reading = [node for node in graph.nodes if node.op == "call_function" and node not in dropped]
    reading = [node for node in reading if not dropped.isdisjoint(node.all_input_nodes)]
    for node in reading:
        _replace_reads(node, dropped)
    terms = [node for node in reading if node.target is COPY_WITH_STRIDES]
    for node, strides in term_strides(graph, terms, (_keep_gradient, _copy_gradient, accumulate)).items():
        node.args = node.args[0], strides
    _release_unread(graph)
    graph.lint()
    return fx.GraphModule(half, graph)


def _unused_nodes(graph: fx.Graph, tangents: Sequence[str], unused: Set[str]) -> Set[fx.Node]:
    """Return the nodes that depend on unused tangents, and on no other tangent or gradient."""
    inputs = graph.find_nodes(op="placeholder")
    first = [node.target for node in inputs].index(tangents[0])
    unused_nodes = {node for node in inputs[first:] if node.target in unused}
    live = {*inputs[first:]} - unused_nodes
    for node in graph.nodes:
        if not live.isdisjoint(node.all_input_nodes):
            live.add(node)
        elif not unused_nodes.isdisjoint(node.all_input_nodes):
            unused_nodes.add(node)
    return unused_nodes


def _replace_reads(node: fx.Node, unused_nodes: Set[fx.Node]) -> None:
    """Let a node read no unused node."""
    terms = node.args[:2]
    if node.target is accumulate:
        node.target = _keep_gradient if terms[1] in unused_nodes else _copy_gradient
    elif is_sum(node) and _is_alike(node):
        node.target, node.args = COPY_WITH_STRIDES, (terms[terms[0] in unused_nodes], list(node.meta["val"].stride()))
    else:
        with node.graph.inserting_before(node):
            for read in node.all_input_nodes:
                if read in unused_nodes:
                    value: Tensor = read.meta["val"]
                    layout = tuple(value.shape), value.stride(), value.dtype, value.device
                    node.replace_input_with(read, node.graph.call_function(zeros_with_strides, layout))


def _release_unread(graph: fx.Graph) -> None:
    """Read unread inputs at the start: a graph keeps an input until its last reader has run."""
    inputs = graph.find_nodes(op="placeholder")
    with graph.inserting_after(inputs[-1]):
        for node in inputs:
            if not node.users:
                graph.call_function(_read, (node,))


def _read(tensor: Tensor) -> None:
    pass


def _is_alike(node: fx.Node) -> bool:
    """Return True if the inputs have the shape and the dtype of the result."""
    return len({(each.meta["val"].shape, each.meta["val"].dtype) for each in (node, *node.all_input_nodes)}) == 1


def zeros_with_strides(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros of this layout, in the least memory that it takes."""
    like = torch.empty_strided(size, stride, dtype=dtype, device="meta")
    flat = torch.zeros(like.untyped_storage().nbytes() // like.itemsize, dtype=dtype, device=device)
    return flat.as_strided(size, stride)


def _keep_gradient(gradient: Tensor | None, new: Tensor) -> Tensor:
    return new if gradient is None else gradient


def _copy_gradient(gradient: Tensor, new: Tensor) -> Tensor:
    return gradient.copy_(new)


def term_strides(graph: fx.Graph, copies: Collection[fx.Node], ends: Collection[Any]) -> dict[fx.Node, list[int]]:
    """Return the strides of copies of terms; none if an op behind them can't take a value in such strides.

    Args:
        copies: nodes that copy their first argument, in place of a sum.
        ends: targets of nodes that take any strides, and whose results no op reads.
    """
    changed: dict[fx.Node, Any] = {}

    def value(node: fx.Node) -> Any:
        return changed.get(node) if node in changed else _without_bytes(node.meta["val"])

    for node in graph.nodes:
        if node.op == "output" or node.target in ends:
            continue
        if node in copies:
            result = value(node.args[0])
            if not is_dense(result):
                return {}
        elif changed.keys().isdisjoint(node.all_input_nodes):
            continue
        elif not _is_known(node.target):
            return {}
        else:
            args, kwargs = map_arg((node.args, node.kwargs), value)
            try:
                result = node.target(*args, **kwargs)
            except RuntimeError:  # no view of these strides
                return {}
        if _strides(result) != _strides(node.meta["val"]):
            changed[node] = result
    return {node: list(changed[node].stride()) for node in copies if node in changed}


def _is_known(target: Any) -> bool:
    return target is operator.getitem or (isinstance(target, OpOverload) and target.namespace == "aten")


def _without_bytes(thing: Any) -> Any:
    def leaf(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    return pytree.tree_map_only(Tensor, leaf, thing)


def _strides(thing: Any) -> list[tuple[int, ...]]:
    return [leaf.stride() for leaf in pytree.tree_leaves(thing) if isinstance(leaf, Tensor)]
