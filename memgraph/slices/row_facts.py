"""Rules by which the ops of a graph run on some of their rows.

    %mm : aten.mm(%a, %b)    ->    0:1<0:1,-    1:2<-,1:2    +<1:2,0:1        linear in a, and in b

A rule is right if running the op on parts and putting the results together, or adding them up, is running it on the
whole. Each op has the rules that follow from what it computes; an op that is not known here runs whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from passes.slices.row_rule import Dims, RowFacts, RowRule

from ..graph.nodes import aten, changes_inputs, is_random
from .linear_reads import COPIES, VIEWS, linear_reads

Shape = tuple[int, ...]


def row_facts(node: fx.Node) -> RowFacts:
    """Return how a node runs in parts; no rules if it can't."""
    tensor = node.meta.get("val")
    if not isinstance(node.target, OpOverload) or not isinstance(tensor, Tensor):
        return RowFacts()
    if is_random(node) or changes_inputs(node) or not all(isinstance(_value(n), Tensor) for n in node.all_input_nodes):
        return RowFacts()
    rules = RULES.get(node.target) or (_elementwise if _is_elementwise(node.target) else None)
    if rules is None:
        return RowFacts()
    found = tuple(rule for rule in rules(node) if len(rule.reads) == len(node.all_input_nodes))
    return RowFacts(found, linear_reads(node))


def _is_elementwise(target: OpOverload) -> bool:
    return torch.Tag.pointwise in target.tags or target in COPIES


def _elementwise(node: fx.Node) -> Iterator[RowRule]:
    out = _shape(node)
    for dims in _spans(out):
        reads = [_broadcast(_shape(read), out, dims) for read in node.all_input_nodes]
        if MIXED not in reads:
            yield RowRule(dims, tuple(reads))


MIXED: Any = "some of the dimensions are broadcast"


def _broadcast(shape: Shape, out: Shape, dims: Dims) -> Dims | None:
    """Return the dimensions of an input that are rows of the result; None if it is broadcast over them."""
    offset = len(out) - len(shape)
    own = [dim - offset >= 0 and shape[dim - offset] == out[dim] for dim in range(*dims) if out[dim] != 1]
    if all(own):
        return (dims[0] - offset, dims[1] - offset) if dims[0] >= offset else MIXED
    return MIXED if any(own) else None


def _viewed(node: fx.Node) -> Iterator[RowRule]:
    """Yield the rules of a view with other sizes of the same elements in the same order."""
    shape, out = _shape(node.all_input_nodes[0]), _shape(node)
    for dims in _spans(out):
        before, rows = math.prod(out[: dims[0]]), math.prod(out[slice(*dims)])
        begins = [own for own in _spans(shape) if math.prod(shape[: own[0]]) == before]
        same = [own for own in begins if math.prod(shape[slice(*own)]) == rows]
        if same:
            yield RowRule(dims, (min(same, key=lambda own: own[1] - own[0]),))
        # Fewer rows, with several elements in each: the outermost of what is divided in another way.
        for own in begins:
            if own not in same and dims[1] - dims[0] == own[1] - own[0] == 1:
                yield RowRule(dims, (own,))


def _permuted(order: Callable[[fx.Node], Sequence[int]]) -> Callable[[fx.Node], Iterator[RowRule]]:
    """Return the rules of an op whose result has dimension `order[i]` of its input at i."""

    def rules(node: fx.Node) -> Iterator[RowRule]:
        sources = list(order(node))
        for begin, end in _spans(_shape(node)):
            first = sources[begin]
            if sources[begin:end] == list(range(first, first + end - begin)) and first >= 0:
                yield RowRule((begin, end), ((first, first + end - begin),))

    return rules


def _order_of_transpose(node: fx.Node) -> list[int]:
    rank = len(_shape(node))
    order = list(range(rank))
    dims: Any = node.args[1:3]
    first, second = (dim % max(1, rank) for dim in dims)
    if rank:
        order[first], order[second] = order[second], order[first]
    return order


def _order_of_unsqueeze(node: fx.Node) -> list[int]:
    rank = len(_shape(node))
    order = list(range(rank - 1))
    dim: Any = node.args[1]
    order.insert(dim % rank, -1)
    return order


def _order_of_squeeze(node: fx.Node) -> list[int]:
    shape = _shape(node.all_input_nodes[0])
    given: Any = node.args[1] if len(node.args) > 1 else range(len(shape))
    dims = {dim % max(1, len(shape)) for dim in ([given] if isinstance(given, int) else given)}
    # A dimension that it would drop is kept only while it has several rows, and a part may have one.
    return [-2 if dim in dims else dim for dim in range(len(shape)) if dim not in dims or shape[dim] != 1]


def _without(dims_of: Callable[[fx.Node], Iterable[int]]) -> Callable[[fx.Node], Iterator[RowRule]]:
    """Return the rules of an op that mixes elements along some dimensions only, and keeps the number of them."""

    def rules(node: fx.Node) -> Iterator[RowRule]:
        shapes = [_shape(read) for read in node.all_input_nodes]
        mixed = {dim % max(1, len(_shape(node))) for dim in dims_of(node)}
        for dims in _spans(_shape(node)):
            rows = _shape(node)[slice(*dims)]
            if mixed.isdisjoint(range(*dims)) and all(shape[slice(*dims)] == rows for shape in shapes):
                yield RowRule(dims, (dims,) * len(shapes))

    return rules


def _reduced(node: fx.Node) -> Iterator[RowRule]:
    """Yield the rules of a reduction over dimensions: those that it keeps."""
    shape = _shape(node.all_input_nodes[0])
    dims, keeps = _reduced_dims(node)
    for begin, end in _spans(shape):
        if dims.isdisjoint(range(begin, end)):
            gone = 0 if keeps else sum(dim < begin for dim in dims)
            yield RowRule((begin - gone, end - gone), ((begin, end),))


def _summed(node: fx.Node) -> Iterator[RowRule]:
    """Yield the rules of a sum: those of a reduction, and the dimensions over which it adds."""
    yield from _reduced(node)
    dims, _ = _reduced_dims(node)
    for own in _spans(_shape(node.all_input_nodes[0])):
        if set(range(*own)) <= dims:
            yield RowRule(None, (own,))


def _reduced_dims(node: fx.Node) -> tuple[set[int], bool]:
    rank = max(1, len(_shape(node.all_input_nodes[0])))
    given: Any = node.args[1] if len(node.args) > 1 else None
    if isinstance(given, int):
        given = [given]
    dims = set(range(rank)) if not given else {dim % rank for dim in given}
    return dims, bool(node.args[2]) if len(node.args) > 2 else bool(node.kwargs.get("keepdim", False))


def _product(node: fx.Node) -> Iterator[RowRule]:
    if len(node.all_input_nodes) == 2:
        yield RowRule((0, 1), ((0, 1), None))
        yield RowRule((1, 2), (None, (1, 2)))
        yield RowRule(None, ((1, 2), (0, 1)))


def _product_and_sum(node: fx.Node) -> Iterator[RowRule]:
    out = _shape(node)
    for dims, factors in (((0, 1), ((0, 1), None)), ((1, 2), (None, (1, 2)))):
        bias = _broadcast(_shape(node.all_input_nodes[0]), out, dims)
        if bias is not MIXED:
            yield RowRule(dims, (bias, *factors))


def _batched_product(node: fx.Node) -> Iterator[RowRule]:
    yield RowRule((0, 1), ((0, 1), (0, 1)))
    yield RowRule((1, 2), ((1, 2), None))
    yield RowRule((2, 3), (None, (2, 3)))
    yield RowRule(None, ((2, 3), (1, 2)))


def _embedded(node: fx.Node) -> Iterator[RowRule]:
    indices = _shape(node.all_input_nodes[1])
    for dims in _spans(indices):
        yield RowRule(dims, (None, dims))


def _loss_gradient(node: fx.Node) -> Iterator[RowRule]:
    """Yield the rule of the gradient of a loss over classes, `nll_loss_backward`."""
    gradient, values, target = cast("tuple[fx.Node, ...]", node.args[:3])
    by_row = node.args[4] == 0
    divided = {gradient: (0, 1) if by_row else None, values: (0, 1), target: (0, 1)}
    if len(_shape(node)) == 2:
        yield RowRule((0, 1), tuple(divided.get(read) for read in node.all_input_nodes))


def _constant(node: fx.Node) -> Iterator[RowRule]:
    """Yield the rules of an op that makes the same number everywhere, whatever it reads."""
    for dims in _spans(_shape(node)):
        yield RowRule(dims, (None,) * len(node.all_input_nodes))


def _dim(place: int) -> Callable[[fx.Node], Iterable[int]]:
    def dims(node: fx.Node) -> Iterable[int]:
        given: Any = node.args[place] if len(node.args) > place else 0
        return [given] if isinstance(given, int) else given

    return dims


def _spans(shape: Shape) -> Iterator[Dims]:
    """Yield one dimension, or two neighbouring ones, that have more than one row."""
    for length in (1, 2):
        for begin in range(len(shape) - length + 1):
            if math.prod(shape[begin : begin + length]) > 1:
                yield begin, begin + length


def _value(node: fx.Node) -> object:
    return node.meta.get("val")


def _shape(node: fx.Node) -> Shape:
    return tuple(node.meta["val"].shape)


RULES: Mapping[Any, Callable[[fx.Node], Iterator[RowRule]]] = {
    **dict.fromkeys(VIEWS, _viewed),
    aten.t.default: _permuted(lambda node: range(len(_shape(node)))[::-1]),
    aten.transpose.int: _permuted(_order_of_transpose),
    aten.permute.default: _permuted(lambda node: [dim % len(_shape(node)) for dim in node.args[1]]),  # type: ignore
    aten.unsqueeze.default: _permuted(_order_of_unsqueeze),
    aten.squeeze.default: _permuted(_order_of_squeeze),
    aten.squeeze.dim: _permuted(_order_of_squeeze),
    aten.squeeze.dims: _permuted(_order_of_squeeze),
    aten.expand.default: _elementwise,
    aten.slice.Tensor: _without(_dim(1)),
    aten.slice_backward.default: _without(_dim(2)),
    aten.cat.default: _without(_dim(1)),
    aten.flip.default: _without(_dim(1)),
    aten.gather.default: _without(_dim(1)),
    aten.scatter.src: _without(_dim(1)),
    aten.scatter.value: _without(_dim(1)),
    aten.scatter_add.default: _without(_dim(1)),
    aten._softmax.default: _without(_dim(1)),
    aten._log_softmax.default: _without(_dim(1)),
    aten._softmax_backward_data.default: _without(_dim(2)),
    aten._log_softmax_backward_data.default: _without(_dim(2)),
    aten.sum.default: _summed,
    aten.sum.dim_IntList: _summed,
    **dict.fromkeys((aten.mean.dim, aten.amax.default, aten.amin.default, aten.logsumexp.default), _reduced),
    **dict.fromkeys((aten.var.correction, aten.std.correction), _reduced),
    aten.mm.default: _product,
    aten.addmm.default: _product_and_sum,
    aten.bmm.default: _batched_product,
    aten.embedding.default: _embedded,
    aten.nll_loss_backward.default: _loss_gradient,
    **dict.fromkeys((aten.zeros.default, aten.new_zeros.default, aten.full.default, aten.new_full.default), _constant),
    **dict.fromkeys((aten.zeros_like.default, aten.full_like.default), _elementwise),
}
