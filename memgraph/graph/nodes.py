"""What can be read off a node of a traced graph, and what may be dropped of such a graph.

%add_ : aten.add_.Tensor(%x, %y)    ->   writes to %x; holds the storage of %x; makes nothing
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses import FakeTensorMode
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

aten = torch.ops.aten
ALIASES = (aten.detach.default, aten.alias.default)
STATISTICS = ("running_mean", "running_var")  # which batch norms change without saying so


def tensors(node: fx.Node) -> list[Tensor]:
    """The fake tensors of its value."""
    return [leaf for leaf in pytree.tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor)]


def storages(node: fx.Node) -> set[int]:
    """The storages that its value holds."""
    return {tensor.untyped_storage()._cdata for tensor in tensors(node)}


def all_storages(nodes: Iterable[fx.Node]) -> set[int]:
    """The storages that their values hold."""
    return {storage for node in nodes for storage in storages(node)}


def allocates_nothing(node: fx.Node) -> bool:
    """Whether its value holds only storages of what it reads, as that of a view."""
    return storages(node) <= all_storages(node.all_input_nodes)


def returned_values(graph: fx.Graph) -> list[Any]:
    """The nodes that the graph returns."""
    return list(graph.output_node().args[0])  # type: ignore[arg-type]


def changes_inputs(node: fx.Node) -> bool:
    """Whether it writes to what it reads; the batch norms that update running statistics don't say so themselves."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    return node.target._schema.is_mutable or node.target._schema.name.endswith("batch_norm")


def written_inputs(node: fx.Node) -> list[fx.Node]:
    """The values that it writes to, as its schema says, or as is known of batch norms that update statistics."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not changes_inputs(node):
        return []
    given = dict(zip([argument.name for argument in schema.arguments], node.args, strict=False)) | dict(node.kwargs)
    aliases = {argument.name: argument.alias_info for argument in schema.arguments}
    if schema.is_mutable:
        names = [name for name, alias in aliases.items() if alias is not None and alias.is_write]
    else:  # cudnn_batch_norm and the like
        names = [*STATISTICS] if given.get("training", True) else []
    return [value for value in map(given.get, names) if isinstance(value, fx.Node)]


def fake_result(node: fx.Node, mode: FakeTensorMode) -> Any:
    """The fake value that it has, reading what it reads now."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda read: read.meta["val"])
    with mode, torch.no_grad():
        return node.target(*args, **kwargs)  # type: ignore[operator]


def is_random(node: fx.Node) -> bool:
    """Whether it may draw random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def drop_dead(graph: fx.Graph) -> None:
    """Drop what nobody reads, but not what draws random numbers: the next op would draw others."""
    for node in reversed(graph.nodes):
        needed = node.users or changes_inputs(node) or is_random(node) or node.is_impure()
        if node.op in ("call_function", "get_attr") and not needed:
            graph.erase_node(node)


def drop_aliases(graph: fx.Graph, kept: set[fx.Node]) -> None:
    """Drop what only gives a value another name, as autograd does with all that it saves."""
    for node in graph.nodes:
        if node.target in ALIASES and node not in kept:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def drop_identity_views(graph: fx.Graph, kept: set[fx.Node]) -> None:
    """Let a view that lies as something does that it is a view of be that: `t(t(x))` is `x`."""
    behind: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        source = _viewed(node)
        if source is None:
            continue
        behind[node] = [source, *behind.get(source, ())]
        same = next((other for other in behind[node] if _lies(other) == _lies(node)), None)
        if same is not None and node not in kept:
            node.replace_all_uses_with(same)
            graph.erase_node(node)


def drop_copies(graph: fx.Graph) -> None:
    """Let what copies a value that nobody changes any more be that value.

    Neither of them is handed out, and the value is all of its storage, so that nothing lives longer than with the copy.
    """
    given = all_storages(
        [*graph.find_nodes(op="placeholder"), *graph.find_nodes(op="get_attr"), *returned_values(graph)]
    )
    for node in graph.find_nodes(op="call_function", target=aten.clone.default):
        source = node.args[0]
        whole = source.meta["val"].untyped_storage().nbytes() == node.meta["val"].untyped_storage().nbytes()
        if whole and _lies(source) == _lies(node) and not (storages(node) | storages(source)) & given:
            views = [user for user in node.users if storages(user) & storages(node)]
            if not views:
                node.replace_all_uses_with(source)
                graph.erase_node(node)


def drop_unread_statistics(graph: fx.Graph) -> None:
    """Drop the running statistics that the backward of a batch norm in training is given, and does not read."""
    for node in graph.find_nodes(op="call_function", target=aten.native_batch_norm_backward.default):
        if node.args[7] is True:
            node.args = (*node.args[:3], None, None, *node.args[5:])


def changed_storages(graph: fx.Graph) -> set[int]:
    """The storages to which ops of a graph write, as far as their schemas say so."""
    return all_storages(written for node in graph.nodes for written in written_inputs(node))


def _viewed(node: fx.Node) -> fx.Node | None:
    """What a node is a view of, if it is one tensor's view of one tensor."""
    if not isinstance(node.target, OpOverload) or node.target._schema.is_mutable or len(node.all_input_nodes) != 1:
        return None
    source = node.all_input_nodes[0]
    tensors = isinstance(node.meta.get("val"), Tensor) and isinstance(source.meta.get("val"), Tensor)
    return source if tensors and storages(node) == storages(source) else None


def _lies(node: fx.Node) -> object:
    value: Tensor = node.meta["val"]
    lazy = value.is_conj(), value.is_neg()
    return value.dtype, value.shape, value.stride(), value.storage_offset(), lazy


def is_lazy(node: fx.Node) -> bool:
    """Whether a node's tensor is yet to be conjugated or negated, by whoever reads it."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and (value.is_conj() or value.is_neg())


def merge_constants(graph: fx.Graph) -> None:
    """Let each constant be fetched once, before all ops."""
    placeholders = graph.find_nodes(op="placeholder")
    first: dict[str, fx.Node] = {}
    for node in graph.find_nodes(op="get_attr"):
        if str(node.target) in first:
            node.replace_all_uses_with(first[str(node.target)])
            graph.erase_node(node)
        else:
            first[str(node.target)] = node
            if placeholders:
                placeholders[-1].append(node)
