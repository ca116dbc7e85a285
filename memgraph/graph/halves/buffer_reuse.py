"""Let ops write into the memory of dead values.

    c = aten.mm.default(b, v)    ->    c_memory = aten.as_strided.default(a, [512, 512], [512, 1], 0)
                                       c = aten.mm.out(b, v, out = c_memory)

Only ops whose kernel writes there do so: of many ops torch makes such an overload that copies the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from passes import Forecast
from passes.schedule.buffer_reuse import reused_buffers

from ...system.device import RETURNED, returns_freed_memory
from ..nodes import aten

FUNCTIONAL = "functional"  # in a node's meta: its target without reuse, and the keyword of the memory
WITH_NUMBER = {  # these run the kernel of two tensors
    aten.add.Scalar: aten.add.out,
    aten.sub.Scalar: aten.sub.out,
    aten.mul.Scalar: aten.mul.out,
    aten.div.Scalar: aten.div.out,
}
COPIES = (aten.clone.default, aten._to_copy.default)


def copy_into(source: Tensor, *, out: Tensor, **layout: Any) -> Tensor:
    """Do what `clone` and `_to_copy` do, whose own overload for this makes a copy first."""
    return out.copy_(source)


def dead_memory(graph: fx.Graph, forecast: Forecast) -> dict[str, str]:
    """Return the dead value into whose memory each op writes, by name.

    None does where freed memory is kept by the allocator, which gives it to the next values by itself.
    """
    if forecast.machine.device != "cpu" or not returns_freed_memory():
        return {}
    return reused_buffers(forecast, writable(graph), RETURNED)


def writable(graph: fx.Graph) -> frozenset[str]:
    """Return the names of the nodes that can write their result into given memory."""
    return frozenset(node.name for node in graph.nodes if _is_writable(node))


def reuse_buffers(graph: fx.Graph, reused: Mapping[str, str]) -> None:
    """Let nodes write into the memory of others, by their names; what the graph does not compute is left out."""
    nodes = {node.name: node for node in graph.nodes if node.op == "call_function"}
    for node in (nodes[name] for name in nodes if name in reused):
        into = _overload(node.target)
        assert into is not None, f"{node.target} writes into no given memory"
        keyword, base, value = _keyword(into), nodes[reused[node.name]], node.meta["val"]
        node.meta[FUNCTIONAL] = node.target, keyword
        with graph.inserting_before(node):
            memory = graph.call_function(aten.as_strided.default, (base, list(value.shape), list(value.stride()), 0))
        memory.name, memory.meta = f"{node.name}_memory", {"val": value}
        node.target, node.kwargs = into, {**node.kwargs, keyword: memory}


def reused_memory(graph: fx.Graph) -> dict[str, str]:
    """Return the dead value into whose memory each op of a half writes, by name."""
    writers = [node for node in graph.nodes if FUNCTIONAL in node.meta]
    return {node.name: node.kwargs[node.meta[FUNCTIONAL][1]].args[0].name for node in writers}


def undo_reuse(graph: fx.Graph) -> None:
    """Let every node make its own memory again."""
    for node in graph.nodes:
        if FUNCTIONAL in node.meta:
            node.target, keyword = node.meta.pop(FUNCTIONAL)
            memory = node.kwargs[keyword]
            node.kwargs = {name: value for name, value in node.kwargs.items() if name != keyword}
            graph.erase_node(memory)


def _is_writable(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, Tensor) or _overload(node.target) is None:
        return False
    return value.layout is torch.strided and value.storage_offset() == 0 and not value.dtype.is_complex


@cache
def _overload(target: Any) -> Any:
    """Return what does the same as an op, and has a kernel that writes the only result into given memory."""
    if target in COPIES:
        return copy_into
    if target in WITH_NUMBER or not isinstance(target, OpOverload):
        return WITH_NUMBER.get(target)
    if target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags:
        return None
    for overload in (getattr(target.overloadpacket, name) for name in target.overloadpacket.overloads()):
        given = sum(argument.is_out for argument in overload._schema.arguments)
        if given == 1 and _inputs(overload) == _inputs(target) and torch.Tag.generated not in overload.tags:
            return overload
    return None


def _inputs(target: OpOverload) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in target._schema.arguments if not argument.is_out]


def _keyword(into: Any) -> str:
    if into is copy_into:
        return "out"
    return next(argument.name for argument in into._schema.arguments if argument.is_out)
