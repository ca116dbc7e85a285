"""A backward half for a loss that is made of only some of the outputs: the gradients of the others are left out.

    d = mm(tangent_0, w)                         d = mm(tangent_0, w)
    e = mul(tangent_1, inf)                      e = mul(tangent_1, inf)      # of zeros, and nobody reads it
    g = add(d, e)                       ->       g = laid(d, g's strides)
    h = cat([d, e])                              h = cat([d, zeros like e])

So autograd does it: what no gradient has come to is in no sum, and is zero elsewhere.  The zeros that stand for the
gradient of such an output do not do: 0 x inf is NaN.  No op takes more memory than it did.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set

import torch
from torch import Tensor, fx

from .aten_shims import COPY_WITH_STRIDES
from .nodes import aten
from .ops import accumulate


def drop_unused(half: fx.GraphModule, tangents: Sequence[str], unused: Collection[int]) -> fx.GraphModule:
    """The same half, in which those of the `tangents`, the names of its inputs, have no part that are `unused`, by
    place; each input behind them is a gradient to be added to."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.set_codegen(type(half.graph._codegen)())
    graph.output(graph.graph_copy(half.graph, copies))
    idle = _idle(graph, tangents, {tangents[i] for i in unused})
    for node in graph.nodes:
        if node.op == "call_function" and node not in idle and not idle.isdisjoint(node.all_input_nodes):
            _leave_out(node, idle)
    _let_go(graph)
    graph.lint()
    return fx.GraphModule(half, graph)


def _idle(graph: fx.Graph, tangents: Sequence[str], unused: Set[str]) -> Set[fx.Node]:
    """What is made of unused tangents, and of no others and no gradient that is there; it is zero, or should be."""
    inputs = graph.find_nodes(op="placeholder")
    first = [node.target for node in inputs].index(tangents[0])
    live, idle = {node for node in inputs[first:] if node.target not in unused}, set[fx.Node]()
    idle |= {node for node in inputs[first:] if node not in live}
    for node in graph.nodes:
        if not live.isdisjoint(node.all_input_nodes):
            live.add(node)
        elif not idle.isdisjoint(node.all_input_nodes):
            idle.add(node)
    return idle


def _leave_out(node: fx.Node, idle: Set[fx.Node]) -> None:
    """Let a node read nothing idle."""
    terms = node.args[:2]
    if node.target is accumulate:
        node.target = _kept if terms[1] in idle else _taken
    elif node.target is aten.add.Tensor and not node.kwargs and _is_sum(node):
        node.target, node.args = COPY_WITH_STRIDES, (terms[terms[0] in idle], list(node.meta["val"].stride()))
    else:
        with node.graph.inserting_before(node):
            for read in node.all_input_nodes:
                if read in idle:
                    value: Tensor = read.meta["val"]
                    lies = tuple(value.shape), value.stride(), value.dtype, value.device
                    node.replace_input_with(read, node.graph.call_function(zero_inputs, lies))


def _let_go(graph: fx.Graph) -> None:
    """Let inputs that nobody reads any more go at the begin: a graph keeps an input until its last reader has run."""
    inputs = graph.find_nodes(op="placeholder")
    with graph.inserting_after(inputs[-1]):
        for node in inputs:
            if not node.users:
                graph.call_function(_read, (node,))


def _read(tensor: Tensor) -> None:
    """Nothing."""


def _is_sum(node: fx.Node) -> bool:
    """Whether it adds tensors that look alike, and not one to every row of the other."""
    alike = {(read.meta["val"].shape, read.meta["val"].dtype) for read in (node, *node.all_input_nodes)}
    return len(alike) == 1 and len(node.all_input_nodes) == 2


def zero_inputs(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that lie so, in no more memory than that takes."""
    like = torch.empty_strided(size, stride, dtype=dtype, device="meta")
    flat = torch.zeros(like.untyped_storage().nbytes() // like.itemsize, dtype=dtype, device=device)
    return flat.as_strided(size, stride)


def _kept(gradient: Tensor | None, new: Tensor) -> Tensor:
    return new if gradient is None else gradient


def _taken(gradient: Tensor, new: Tensor) -> Tensor:
    return gradient.copy_(new)
