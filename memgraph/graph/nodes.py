"""Facts about the nodes of a traced graph, and removal of nodes that are not needed.

%add_ : aten.add_.Tensor(%x, %y)    ->   writes to %x; holds the storage of %x; allocates nothing
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses import FakeTensorMode
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from ..tensors.traced_size import always_equal, with_sizes

aten = torch.ops.aten
DEVICE_OF = torch.ops.prim.device.default  # asked more often than anything else, and no op
ALIASES = (aten.detach.default, aten.alias.default)
GUARDS = "memgraph_guards"  # namespace of ops
UNGUARDED = -1  # number of such an op that checks nothing, since its sizes follow from an earlier one
STATISTICS = ("running_mean", "running_var")  # batch norms change these, though their schemas do not say so
# Their results share no element. Whoever calls these promises to read the whole no more once a part has changed.
SPLITS = (aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default)


def tensors(node: fx.Node) -> list[Tensor]:
    """Return the fake tensors of a node's value."""
    value = node.meta.get("val")
    if isinstance(value, Tensor):  # most are; pytree takes 6 us to say so
        return [value]
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def storages(node: fx.Node) -> set[int]:
    """Return the storages of a node's value."""
    return {tensor.untyped_storage()._cdata for tensor in tensors(node)}


def all_storages(nodes: Iterable[fx.Node]) -> set[int]:
    return {storage for node in nodes for storage in storages(node)}


def allocates_nothing(node: fx.Node) -> bool:
    """Return True if the value only has storages of the node's inputs, as a view does."""
    return storages(node) <= all_storages(node.all_input_nodes)


def is_sum(node: fx.Node) -> bool:
    """Return True if the node adds two values of the graph."""
    return node.target is aten.add.Tensor and len(node.all_input_nodes) == len(node.args) == 2 and not node.kwargs


def named_placeholder(graph: fx.Graph, name: str) -> fx.Node:
    """Add an input of this very name.

    `Graph.placeholder` names the node of an input `a.B` `a_b`. Its code then has two variables for one value, and
    frees the second one alone.
    """
    node = graph.create_node("placeholder", name, (), {}, name=name)
    node.target = node.name
    return node


def returned_values(graph: fx.Graph) -> list[Any]:
    return list(graph.output_node().args[0])  # type: ignore[arg-type]


def changes_inputs(node: fx.Node) -> bool:
    """Return True if the node writes to its inputs. Batch norms write to running statistics without saying so."""
    return node.op == "call_function" and isinstance(node.target, OpOverload) and _changes_arguments(node.target)


def written_inputs(node: fx.Node) -> list[fx.Node]:
    """Return the inputs that the node writes to, by its schema or as a batch norm that updates statistics."""
    if not changes_inputs(node):
        return []
    written = written_arguments(node.target, node.args, node.kwargs)  # type: ignore[arg-type]
    return [value for value in written if isinstance(value, fx.Node)]


def written_arguments(target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that an op writes to."""
    schema = target._schema
    if not _changes_arguments(target):
        return []
    given = dict(zip([argument.name for argument in schema.arguments], args, strict=False)) | dict(kwargs)
    if not schema.is_mutable:  # cudnn_batch_norm and the like
        return [given.get(name) for name in STATISTICS] if given.get("training", True) else []
    aliases = {argument.name: argument.alias_info for argument in schema.arguments}
    return [given.get(name) for name, alias in aliases.items() if alias is not None and alias.is_write]


def _changes_arguments(target: OpOverload) -> bool:
    return target._schema.is_mutable or target._schema.name.endswith("batch_norm")


def argument_types(target: OpOverload) -> list[tuple[str, str]]:
    """Return names and types of an op's arguments."""
    return [(argument.name, str(argument.type)) for argument in target._schema.arguments]


def fake_result(node: fx.Node, mode: FakeTensorMode) -> Any:
    """Run a node on the fake values of its inputs."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda read: read.meta["val"])
    if mode.shape_env is not None:
        args, kwargs = with_sizes((args, kwargs))
    with mode, torch.no_grad():
        return node.target(*args, **kwargs)  # type: ignore[operator]


def is_random(node: fx.Node) -> bool:
    """Return True if the node may draw random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def is_check(node: fx.Node) -> bool:
    """Return True for a guard, and for an op without a result, as one that raises for a singular matrix."""
    schema = node.target._schema if isinstance(node.target, OpOverload) else None
    return schema is not None and not schema.is_mutable and (not schema.returns or is_guard(node))


def is_guard(node: fx.Node) -> bool:
    """Return True if a node checks what a capture assumed about values; see `guard_ops.py`."""
    number: Any = node.kwargs.get("guard", UNGUARDED)
    return isinstance(node.target, OpOverload) and node.target.namespace == GUARDS and bool(number != UNGUARDED)


def drop_dead(graph: fx.Graph) -> None:
    """Drop unread nodes, except those that draw random numbers, since the next op would draw others, and checks."""
    for node in reversed(graph.nodes):
        needed = node.users or changes_inputs(node) or is_random(node) or node.is_impure() or is_check(node)
        if node.op in ("call_function", "get_attr") and not needed:
            graph.erase_node(node)


def drop_aliases(graph: fx.Graph, kept: set[fx.Node]) -> None:
    """Drop nodes that only rename a value, as autograd does with all that it saves.

    Those of a value whose sizes or strides are changed in place stay: each has its own.
    """
    relaid = all_storages(
        node.args[0] for node in graph.nodes if torch.Tag.inplace_view in getattr(node.target, "tags", ())
    )
    for node in graph.nodes:
        if node.target in ALIASES and node not in kept and not (relaid and storages(node) & relaid):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def drop_identity_views(graph: fx.Graph, kept: set[fx.Node]) -> None:
    """Replace a view by its base if it has the same layout: `t(t(x))` is `x`."""
    bases: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        source = _viewed(node)
        if source is None:
            continue
        bases[node] = [source, *bases.get(source, ())]
        same = next((other for other in bases[node] if _has_same_layout(other, node)), None)
        if same is not None and node not in kept:
            node.replace_all_uses_with(same)
            graph.erase_node(node)


def drop_copies(graph: fx.Graph) -> None:
    """Replace a copy by its source if the source does not change after it.

    Neither is an output, and the source fills its storage, so no storage lives longer than with the copy.
    """
    outside = all_storages(
        [*graph.find_nodes(op="placeholder"), *graph.find_nodes(op="get_attr"), *returned_values(graph)]
    ) | changed_storages(graph)
    for node in graph.find_nodes(op="call_function", target=aten.clone.default):
        source = node.args[0]
        whole = always_equal(*([value.meta["val"].untyped_storage().nbytes()] for value in (source, node)))
        if whole and _has_same_layout(source, node) and not (storages(node) | storages(source)) & outside:
            views = [user for user in node.users if storages(user) & storages(node)]
            if not views:
                node.replace_all_uses_with(source)
                graph.erase_node(node)


def drop_unread_statistics(graph: fx.Graph) -> None:
    """Drop the running statistics that the backward of a batch norm in training is given, but does not read."""
    for node in graph.find_nodes(op="call_function", target=aten.native_batch_norm_backward.default):
        if node.args[7] is True:
            node.args = (*node.args[:3], None, None, *node.args[5:])


def changed_storages(graph: fx.Graph) -> set[int]:
    """Return the storages to which ops of a graph write."""
    return all_storages(written for node in graph.nodes for written in written_inputs(node))


def _viewed(node: fx.Node) -> fx.Node | None:
    """Return the base if the node is a view of one tensor."""
    if not isinstance(node.target, OpOverload) or node.target._schema.is_mutable or len(node.all_input_nodes) != 1:
        return None
    source = node.all_input_nodes[0]
    tensors = isinstance(node.meta.get("val"), Tensor) and isinstance(source.meta.get("val"), Tensor)
    return source if tensors and storages(node) == storages(source) else None


def _has_same_layout(node: fx.Node, other: fx.Node) -> bool:
    """Return True if two views have the same elements, for every length."""
    value, like = node.meta["val"], other.meta["val"]
    if (value.dtype, value.is_conj(), value.is_neg()) != (like.dtype, like.is_conj(), like.is_neg()):
        return False
    return has_same_strides(value, like) and always_equal([value.storage_offset()], [like.storage_offset()])


def has_same_strides(value: Tensor, other: Tensor) -> bool:
    """Return True if sizes and strides are equal for every length."""
    return always_equal(value.shape, other.shape) and always_equal(value.stride(), other.stride())


def is_lazy(node: fx.Node) -> bool:
    """Return True if the tensor is lazily conjugated or negated."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and (value.is_conj() or value.is_neg())


def merge_constants(graph: fx.Graph) -> None:
    """Read each constant once, before all ops."""
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
