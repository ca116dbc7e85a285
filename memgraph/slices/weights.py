"""Find the weights whose rows can come and go in blocks: all that reads them are products and lookups.

y = addmm(b, x, t(w)), dx = mm(dy, w), dw = mm(t(dy), x)     ->   Weight(w, reads (addmm, mm), terms (dw,))
dw = accumulate(mm(t(dy_1), x_1), mm(t(dy_2), x_2))          ->   Weight(w, ..., both products as terms, sums (dw,))
n = w * 2                                                    ->   whole: read by aten.mul.Tensor

A weight that is tied, or that micro-batches read, has a gradient of several terms.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from passes.slices.whole_weight import Reason, WholeWeight

from ..graph.captured import Captured
from ..graph.nodes import all_storages, aten, is_sum, returned_values, tensors, written_inputs
from ..graph.ops import accumulate
from ..graph.summarize import fn_of

PRODUCTS: dict[object, int] = {aten.mm.default: 2, aten.addmm.default: 3}  # arguments; the last one is the weight
LOOKUP, LOOKUP_GRADIENT = aten.embedding.default, aten.embedding_dense_backward.default
TRANSPOSES = (aten.t.default, aten.transpose.int, aten.permute.default)


CASTS = (aten._to_copy.default,)


@dataclass(frozen=True, eq=False)
class Weight:
    """A matrix that is read by rows.

    Attributes:
        views: its transposes.
        reads: the ops that read it or a transpose.
        terms: the ops that make its gradient, or the terms of it; none if the step makes no gradient.
        sums: the ops that add up these terms, in their order.
    """

    node: fx.Node
    views: tuple[fx.Node, ...]
    reads: tuple[fx.Node, ...]
    terms: tuple[fx.Node, ...] = ()
    sums: tuple[fx.Node, ...] = ()

    @property
    def value(self) -> Tensor:
        """Its fake value, of (rows, columns)."""
        value: Tensor = self.node.meta["val"]
        return value

    @property
    def rows(self) -> int:
        return int(self.value.shape[0])

    @property
    def row_nbytes(self) -> int:
        return int(self.value.shape[1]) * self.value.itemsize

    @property
    def gradient(self) -> fx.Node | None:
        """The op that makes its gradient."""
        return (*self.terms, *self.sums)[-1] if self.terms else None

    @property
    def ops(self) -> tuple[fx.Node, ...]:
        """The products and lookups that run in blocks."""
        return *self.reads, *self.terms


def weights_by_name(captured: Captured, held: Container[str] = ()) -> dict[str, Weight]:
    """Return the weights of a step that can be read in blocks, by their parameter's name; not those that are `held`."""
    return {name: each for name, each in _matrices(captured, held).items() if isinstance(each, Weight)}


def whole_weights(
    captured: Captured, refused: Reason | None = None, held: Container[str] = ()
) -> dict[str, WholeWeight]:
    """Return the parameters that have to stay whole, by name; if blocks are `refused` for the step, all that it has."""
    nodes = zip(captured.graph.graph.find_nodes(op="placeholder"), captured.inputs, strict=True)
    nbytes = {role.name: tensors(node)[0].nbytes for node, role in nodes if role.kind == "parameter"}
    if refused is not None:
        return {name: WholeWeight(name, size, refused) for name, size in nbytes.items()}
    kept = ((name, each) for name, each in _matrices(captured, held).items() if isinstance(each, Whole))
    return {name: WholeWeight(name, nbytes[name], each.reason, each.detail) for name, each in kept}


@dataclass(frozen=True)
class Whole:
    """A reason why a weight stays whole, and the op that it is about."""

    reason: Reason
    detail: str = ""


def _matrices(captured: Captured, held: Container[str]) -> dict[str, Weight | Whole]:
    """Return each parameter that the step reads, as a weight that can be cut, or with the reason why it can't be."""
    graph, returned = captured.graph.graph, returned_values(captured.graph.graph)
    kinds = graph.output_node().meta["kinds"]
    gradients = {
        role.name: (node, kind)
        for role, node, kind in zip(captured.outputs, returned, kinds, strict=True)
        if role.kind == "gradient"
    }
    found: dict[str, Weight | Whole] = {}
    for node, role in zip(graph.find_nodes(op="placeholder"), captured.inputs, strict=True):
        if node.meta["kind"] == "parameter" and node.users:
            gradient, kind = gradients.get(role.name, (None, "gradient"))
            is_plain = kind == "gradient" and returned.count(gradient) <= 1
            found[role.name] = weight_of(node, gradient) if is_plain else Whole(Reason.WATCHED)
            if role.name in held:
                found[role.name] = Whole(Reason.HELD)
    return found


def weight_of(node: fx.Node, gradient: fx.Node | None) -> Weight | Whole:
    """Return a matrix with its reads, or why it can't be read in blocks, or its gradient made in blocks."""
    value = node.meta["val"]
    if value.dim() != 2 or not value.is_contiguous() or not value.is_floating_point():
        return Whole(Reason.LAYOUT)
    views = tuple(user for user in node.users if _is_transpose(user, node))
    users = [user for source in (node, *views) for user in source.users if user not in views]
    if whole := next((why for user in users if (why := _refused_read(user, node, views))), None):
        return whole
    if gradient is None:
        return Weight(node, views, tuple(dict.fromkeys(users)))
    terms, sums = _terms(gradient)
    return _refused_terms(terms, sums, value) or Weight(node, views, tuple(dict.fromkeys(users)), terms, sums)


def _is_transpose(node: fx.Node, weight: fx.Node) -> bool:
    if node.target not in TRANSPOSES or node.all_input_nodes != [weight]:
        return False
    value, whole = node.meta["val"], weight.meta["val"]
    return bool(value.shape == whole.shape[::-1] and value.stride() == whole.stride()[::-1])


def _refused_read(node: fx.Node, weight: fx.Node, views: Sequence[fx.Node]) -> Whole | None:
    """Return why an op that reads a weight can't read blocks of it; None if it can."""
    own = (weight, *views)
    if not node.kwargs and node.target in PRODUCTS and len(node.args) == PRODUCTS[node.target]:
        if node.args[-1] in own and not any(argument in own for argument in node.args[:-1]):
            return None
    elif not node.kwargs and node.target is LOOKUP and node.args[0] is weight and node.args[1] not in own:
        return None
    return Whole(Reason.CAST if node.target in CASTS else Reason.READ, fn_of(node))


def _terms(gradient: fx.Node) -> tuple[tuple[fx.Node, ...], tuple[fx.Node, ...]]:
    """Return the ops whose results add up to a gradient, and the sums, in the order of the graph."""
    made, waiting = dict[fx.Node, bool](), [gradient]
    while waiting:
        node = waiting.pop()
        made[node] = is_sum(node) or node.target is accumulate
        waiting += node.all_input_nodes if made[node] else []
    in_order = [node for node in gradient.graph.nodes if node in made]
    return tuple(node for node in in_order if not made[node]), tuple(node for node in in_order if made[node])


def _refused_terms(terms: Sequence[fx.Node], sums: Sequence[fx.Node], weight: Tensor) -> Whole | None:
    """Return why terms, and their sums, can't be made block by block where the last one is; None if they can."""
    for node in (*terms, *sums):
        if len(node.users) > 1 or not (node in sums or _makes_rows(node, weight)):
            return Whole(Reason.GRADIENT, fn_of(node))
    early = [read for term in terms[:-1] for read in term.all_input_nodes if read.op != "placeholder"]
    held, node = all_storages(early), terms[0]
    while sums and node is not sums[-1]:
        if not held.isdisjoint(all_storages(_written(node))):
            return Whole(Reason.WRITTEN)
        node = node.next
    sizes = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for read in early for x in tensors(read)}
    return Whole(Reason.TERMS) if sum(sizes.values()) > weight.nbytes else None


def _makes_rows(gradient: fx.Node, weight: Tensor) -> bool:
    value = gradient.meta["val"]
    if value.shape != weight.shape or not value.is_contiguous() or gradient.kwargs:
        return False
    if gradient.target is LOOKUP_GRADIENT:
        return not gradient.args[4]  # scales by the count of each index, which is of all blocks
    return gradient.target is aten.mm.default


def _written(node: fx.Node) -> Iterable[fx.Node]:
    return node.all_input_nodes[:1] if node.target is accumulate else written_inputs(node)
