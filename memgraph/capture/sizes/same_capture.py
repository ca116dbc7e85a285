"""Compare two captures: ops, arguments, constants, and the layout of every value.

view(x, [960]) -> f32[960]   and   view(x, [960]) -> f32[960]    ->   the same
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import fx
from torch.utils import _pytree as pytree

from ...graph.captured import Captured, Ref
from ...graph.nodes import all_storages, tensors
from ...graph.result_layout import REAL, ResultLayout, layout_in_storage
from ...tensors.traced_number import FloatArgument, FloatValues
from ..python_state.side_effects import described_ops, is_same_constant


def is_same_capture(one: Captured, other: Captured) -> bool:
    """Return True if two captures are the same graph, with values of the same layout in the same storages."""
    same_ops = describe(one, {}) == describe(other, {})
    return same_ops and has_same_constants(one, other) and _has_same_values(one.graph.graph, other.graph.graph)


def describe(captured: Captured, values: FloatValues) -> list[object]:
    """Return all that a capture consists of, with these values of its float inputs."""
    leaves = [leaf if isinstance(leaf, Ref) else (type(leaf), repr(leaf)) for leaf in captured.leaves]
    roles = captured.inputs, captured.outputs, captured.spec, captured.differentiable, captured.tangents
    rest = captured.speculative_outputs, dict(captured.sources), captured.has_custom_functions, dict(captured.rewritten)

    def value(argument: FloatArgument) -> float:
        return float(argument.node.compute(values)) if values else float(argument)

    def written(leaf: object) -> object:
        if not isinstance(leaf, Ref) or leaf.kind != "float":
            return leaf
        return float(captured.floats[leaf.index].compute(values))

    ops = described_ops(captured.graph.graph, partial(pytree.tree_map_only, FloatArgument, value))
    return [leaves, *roles, *rest, sorted(captured.writes.at(written).described), *ops]


def has_same_constants(one: Captured, other: Captured) -> bool:
    """Return True if two captures have the same constants, bit by bit."""
    return all(map(is_same_constant, _constants(one), _constants(other)))


def _constants(captured: Captured) -> list[object]:
    """Return the constants of a graph, one for each op that gets one."""
    return [getattr(captured.graph, str(node.target)) for node in captured.graph.graph.find_nodes(op="get_attr")]


def _has_same_values(one: fx.Graph, other: fx.Graph) -> bool:
    """Compare layouts and shared storages, without values that were corrected since they were traced."""
    corrected = all_storages(node for node in other.nodes if REAL in node.meta)
    first, second = dict[int, int](), dict[int, int]()
    for node, like in zip(one.nodes, other.nodes, strict=True):
        if not corrected.isdisjoint(all_storages([like])):
            continue
        if _values(node, first) != _values(like, second):
            return False
    return True


def _values(node: fx.Node, seen: dict[int, int]) -> Sequence[tuple[int, ResultLayout]]:
    """Return the layouts of a node's values, with the number of each storage in order of its first use."""
    values = tensors(node)
    numbers = [seen.setdefault(value.untyped_storage()._cdata, len(seen)) for value in values]
    return list(zip(numbers, map(layout_in_storage, values), strict=True))
