"""A joint graph -> one GraphModule for forward and one for backward.

    joint:     forward ops, backward ops
    forward:   inputs                     -> outputs, what backward reads
    backward:  what it reads, tangents    -> gradients

Both take one list and empty it, and let go of every value at its last use, so that a saved tensor dies when backward
has read it.


MERGED:A backward half for a loss that is made of only some of the outputs: the gradients of the others are left out.

    d = mm(tangent_0, w)                         d = mm(tangent_0, w)
    e = mul(tangent_1, inf)                      e = mul(tangent_1, inf)      # of zeros, and nobody reads it
    g = add(d, e)                       ->       g = laid(d, g's strides)
    h = cat([d, e])                              h = cat([d, zeros like e])

So autograd does it: what no gradient has come to is in no sum, and is zero elsewhere.  The zeros that stand for the
gradient of such an output do not do: 0 x inf is NaN.  No op takes more memory than it did.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.graph import PythonCode, _BoxedCodeGen

from passes.ir.liveness import RELEASED

from .aten_shims import COPY_WITH_STRIDES
from .nodes import all_storages, aten, returned_values, storages
from .ops import accumulate
from .summarize import PURE_AGAIN

INPUTS_OF_BACKWARD = ("tangent", "gradient")


@dataclass(frozen=True, eq=False)
class Partition:
    """The two modules; backward takes what forward returns behind its outputs, then the tangents, then the
    gradients."""

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    tangents: tuple[Tensor, ...] = ()  # fake: the shapes and strides that backward was captured with
    tangent_names: tuple[str, ...] = ()  # of the tangents
    caller_values: tuple[
        int, ...
    ] = ()  # the places, among inputs and then outputs, of what backward reads of the caller's


def partition(graph: fx.Graph, root: torch.nn.Module) -> Partition:
    """The forward and the backward half of a joint graph whose nodes bear `meta["phase"]`."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    given = [node for node in inputs if node.meta["kind"] in INPUTS_OF_BACKWARD]
    late = {node for node in graph.nodes if node.meta.get("phase") in ("backward", "update")}
    handed = tuple(zip(graph.output_node().meta["kinds"], returned_values(graph), strict=True))
    outputs = [node for kind, node in handed if kind in ("output", RELEASED)]
    gradients = [node for kind, node in handed if kind not in ("output", RELEASED)]
    read = dict.fromkeys(source for node in graph.nodes if node in late for source in node.all_input_nodes)
    read |= dict.fromkeys(gradients)
    saved = tuple(node for node in read if node not in late and node not in given and node.op != "get_attr")
    first = [node for node in inputs if node not in given]
    forward = _module(graph, root, first, [*outputs, *saved], lambda node: node not in late)
    if not gradients and not late:
        return Partition(forward, None)
    tangents = [node for node in given if node.meta["kind"] == "tangent"]
    fakes, names = tuple(node.meta["val"] for node in tangents), tuple(node.name for node in tangents)
    backward = _module(graph, root, [*saved, *given], gradients, late.__contains__)
    kept = all_storages(node for node in saved if not _is_unread(node, late.intersection(node.users)))
    theirs = tuple(i for i, node in enumerate([*first, *outputs]) if not kept.isdisjoint(storages(node)))
    return Partition(forward, backward, fakes, names, theirs)


def _is_unread(node: fx.Node, readers: Collection[fx.Node]) -> bool:
    """Whether ops that run again are given running statistics only to update them, which a second time is to no end.

    The next forward may have changed them before this backward, as in eager.
    """
    again = (user.target in PURE_AGAIN and node in user.args[3:5] and node not in user.args[:3] for user in readers)
    return bool(readers) and all(again)


def _module(
    graph: fx.Graph,
    root: torch.nn.Module,
    inputs: Iterable[fx.Node],
    outputs: Iterable[fx.Node],
    mine: Callable[[fx.Node], bool],
) -> fx.GraphModule:
    """The part of `graph` for whose nodes `mine` holds, as a module from `inputs` to `outputs`."""
    part = fx.Graph()
    part.set_codegen(_DirectCode())
    env = {}
    for node in inputs:
        env[node] = part.placeholder(node.name)
        env[node].meta = dict(node.meta)
    for node in graph.nodes:
        if node not in env and (node.op == "get_attr" or (node.op == "call_function" and mine(node))):
            env[node] = part.node_copy(node, env.__getitem__)
    part.output(tuple(env[node] for node in outputs))
    return fx.GraphModule(root, part)


class _DirectCode(_BoxedCodeGen):
    """Calls what an op's Python object would call: that takes half a microsecond less, of two or three."""

    def _gen_python_code(self, *args: Any, **kwargs: Any) -> PythonCode:
        code = super()._gen_python_code(*args, **kwargs)
        direct: dict[str, Any] = {}

        def name(found: re.Match[str]) -> str:
            namespace, packet, overload = found.groups()
            name = f"op_{namespace}_{packet}_{overload}"
            direct[name] = getattr(getattr(getattr(torch.ops, namespace), packet), overload)._op
            return f" = {name}("

        src = re.sub(r" = torch\.ops\.(\w+)\.(\w+)\.(\w+)\(", name, code.src)
        return replace(code, src=src, globals=code.globals | direct)


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
                    node.replace_input_with(read, node.graph.call_function(zeros_with_strides, lies))


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


def zeros_with_strides(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that lie so, in no more memory than that takes."""
    like = torch.empty_strided(size, stride, dtype=dtype, device="meta")
    flat = torch.zeros(like.untyped_storage().nbytes() // like.itemsize, dtype=dtype, device=device)
    return flat.as_strided(size, stride)


def _kept(gradient: Tensor | None, new: Tensor) -> Tensor:
    return new if gradient is None else gradient


def _taken(gradient: Tensor, new: Tensor) -> Tensor:
    return gradient.copy_(new)
