"""In which of its reads an op is linear.

mul(a, b)                          ->   in a, and in b
add(a, b)                          ->   in both together
_softmax_backward_data(g, out)     ->   in g
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from ..graph.nodes import aten

VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
COPIES = (aten._to_copy.default, aten.clone.default, aten.alias.default, aten.detach.default)
ZEROS = (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
FULL = (aten.full.default, aten.scalar_tensor.default, aten.full_like.default)
LINEAR = (
    *VIEWS, *COPIES, *ZEROS, aten.t.default, aten.transpose.int, aten.permute.default, aten.unsqueeze.default,
    aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.expand.default, aten.slice.Tensor, aten.sum.default,
    aten.sum.dim_IntList, aten.mean.dim, aten.mean.default, aten.neg.default, aten.mul.Scalar, aten.div.Scalar,
    aten.div.Tensor, aten.gather.default, aten.select.int, aten.flip.default,
)  # fmt: skip
BILINEAR = (aten.mul.Tensor, aten.mm.default, aten.bmm.default)
ADDITIVE = (aten.add.Tensor, aten.sub.Tensor, aten.scatter_add.default, aten.scatter.src)


def linear_reads(node: fx.Node) -> tuple[tuple[int, ...], ...]:
    """Return groups of reads, by position: the op is linear in those of a group together."""
    if not node.meta["val"].is_floating_point():
        return ()
    read = [argument for argument in node.args if isinstance(argument, fx.Node)]
    place = {each: i for i, each in enumerate(node.all_input_nodes)}
    first: Any = node.args[0] if node.args else None
    if len(set(read)) != len(read):
        return ()  # a product of a value with itself, and the like
    if node.target in LINEAR or _takes_gradient(node):
        return ((place[first],),) if first in place else ()
    if node.target in BILINEAR:
        return tuple((place[each],) for each in read)
    if node.target in ADDITIVE and len(read) > 1:
        return _of_sum([each for each in read if each.meta["val"].is_floating_point()], place)
    if node.target is aten.cat.default:
        return _of_sum(list(place), place)
    if node.target is aten.where.self:
        return _of_sum(read[1:], place)
    return ((place[first],),) if node.target is aten.masked_fill.Scalar and node.args[2] == 0 else ()


def _takes_gradient(node: fx.Node) -> bool:
    """Return True for the backward of an op, which is linear in the gradient that it is given."""
    schema: Any = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.arguments) and schema.arguments[0].name in ("grad", "grad_output")


def _of_sum(terms: Sequence[fx.Node], place: dict[fx.Node, int]) -> tuple[tuple[int, ...], ...]:
    """Return the groups of an op that is linear in all terms together: all of them, and those that are not zeros."""
    groups = [terms, [each for each in terms if not _makes_zeros(each)]]
    return tuple(dict.fromkeys(tuple(place[each] for each in group) for group in groups if group))


def _makes_zeros(node: fx.Node) -> bool:
    return node.target in ZEROS or (node.target in FULL and bool(node.args[-1] == 0))
