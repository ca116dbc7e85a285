"""A joint graph -> one GraphModule for forward and one for backward.

    joint:     forward ops, backward ops
    forward:   inputs, floats                     -> outputs, what backward reads
    backward:  what it reads, floats, tangents    -> gradients

Both take one list and empty it, and let go of every value at its last use, so that a saved tensor dies when backward
has read it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.graph import PythonCode, _BoxedCodeGen
from torch.utils._pytree import tree_map_only

from passes.ir.liveness import RELEASED

from ..tensors.traced_float import FloatArgument, FloatNode
from .nodes import all_storages, returned_values, storages
from .summarize import PURE_AGAIN

INPUTS_OF_BACKWARD = ("tangent", "gradient")


@dataclass(frozen=True, eq=False)
class Partition:
    """The two modules; backward takes what forward returns behind its outputs, then the floats, then the tangents, then
    the gradients."""

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    tangents: tuple[Tensor, ...] = ()  # fake: the shapes and strides that backward was captured with
    names: tuple[str, ...] = ()  # of the tangents
    read: tuple[int, ...] = ()  # the places, among inputs and then outputs, of what backward reads of the caller's


def partition(graph: fx.Graph, root: torch.nn.Module, floats: Sequence[FloatNode] = ()) -> Partition:
    """The forward and the backward half of a joint graph whose nodes bear `meta["phase"]`; both take these floats."""
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
    forward = _module(graph, root, first, [*outputs, *saved], lambda node: node not in late, floats)
    if not gradients and not late:
        return Partition(forward, None)
    tangents = [node for node in given if node.meta["kind"] == "tangent"]
    fakes, names = tuple(node.meta["val"] for node in tangents), tuple(node.name for node in tangents)
    backward = _module(graph, root, saved, gradients, late.__contains__, floats, given)
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
    floats: Sequence[FloatNode],
    last: Iterable[fx.Node] = (),
) -> fx.GraphModule:
    """The part of `graph` for whose nodes `mine` holds, as a module from `inputs`, `floats` and the `last` inputs to
    `outputs`."""
    part = fx.Graph()
    part.set_codegen(_DirectCode())
    env: dict[fx.Node, fx.Node] = {}

    def add_inputs(nodes: Iterable[fx.Node]) -> None:
        for node in nodes:
            env[node] = part.placeholder(node.name)
            env[node].meta = dict(node.meta)

    add_inputs(inputs)
    float_placeholders = {node: part.placeholder(f"float__in_{i}") for i, node in enumerate(floats)}
    add_inputs(last)
    for node in graph.nodes:
        if node not in env and (node.op == "get_attr" or (node.op == "call_function" and mine(node))):
            env[node] = part.node_copy(node, env.__getitem__)
            if float_placeholders:
                _read_placeholders(env[node], float_placeholders)
    part.output(tuple(env[node] for node in outputs))
    return fx.GraphModule(root, part)


def _read_placeholders(node: fx.Node, placeholders: Mapping[FloatNode, fx.Node]) -> None:
    """Let a node read placeholders instead of the floats at capture."""
    node.args, node.kwargs = tree_map_only(
        FloatArgument, lambda argument: placeholders[argument.node], (node.args, dict(node.kwargs))
    )


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
