"""Find the weights whose rows can come and go in blocks: all that reads them are products and lookups.

y = addmm(b, x, t(w)), dx = mm(dy, w), dw = mm(t(dy), x)     ->   Weight(w, reads (addmm, mm), gradient dw)
n = native_layer_norm(x, w, ...)                             ->   left whole
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from ..graph.captured import Captured
from ..graph.nodes import aten, returned_values

PRODUCTS = {aten.mm.default: 2, aten.addmm.default: 3}  # arguments; the last one is the weight
LOOKUP, LOOKUP_GRADIENT = aten.embedding.default, aten.embedding_dense_backward.default
TRANSPOSES = (aten.t.default, aten.transpose.int, aten.permute.default)


@dataclass(frozen=True, eq=False)
class Weight:
    """A matrix that is read by rows.

    Attributes:
        views: its transposes.
        reads: the ops that read it or a transpose.
        gradient: the op that makes its gradient; None if the step makes none.
    """

    node: fx.Node
    views: tuple[fx.Node, ...]
    reads: tuple[fx.Node, ...]
    gradient: fx.Node | None = None

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
    def ops(self) -> tuple[fx.Node, ...]:
        """The ops that run in blocks."""
        return self.reads if self.gradient is None else (*self.reads, self.gradient)


def weights_by_name(captured: Captured) -> dict[str, Weight]:
    """Return the weights of a step that can be read in blocks, by their parameter's name."""
    graph, returned = captured.graph.graph, returned_values(captured.graph.graph)
    if any(node.meta.get("part") for node in graph.nodes):
        return {}  # a micro-batch reads an alias of its own
    kinds = graph.output_node().meta["kinds"]
    gradients = {
        role.name: (node, kind)
        for role, node, kind in zip(captured.outputs, returned, kinds, strict=True)
        if role.kind == "gradient"
    }
    found = {}
    for node, role in zip(graph.find_nodes(op="placeholder"), captured.inputs, strict=True):
        gradient, kind = gradients.get(role.name, (None, "gradient"))
        is_plain = node.meta["kind"] == "parameter" and kind == "gradient" and returned.count(gradient) <= 1
        if is_plain and (weight := weight_of(node, gradient)) is not None:
            found[role.name] = weight
    return found


def weight_of(node: fx.Node, gradient: fx.Node | None) -> Weight | None:
    """Return a matrix with its reads, if it can be read in blocks, and if its gradient can be made in blocks."""
    value = node.meta["val"]
    if value.dim() != 2 or not value.is_contiguous() or not value.is_floating_point():
        return None
    views = tuple(user for user in node.users if _is_transpose(user, node))
    users = [user for source in (node, *views) for user in source.users if user not in views]
    if not users or not all(_reads_rows(user, node, views) for user in users):
        return None
    if gradient is not None and not _makes_rows(gradient, value):
        return None
    return Weight(node, views, tuple(dict.fromkeys(users)), gradient)


def _is_transpose(node: fx.Node, weight: fx.Node) -> bool:
    if node.target not in TRANSPOSES or node.all_input_nodes != [weight]:
        return False
    value, whole = node.meta["val"], weight.meta["val"]
    return bool(value.shape == whole.shape[::-1] and value.stride() == whole.stride()[::-1])


def _reads_rows(node: fx.Node, weight: fx.Node, views: Sequence[fx.Node]) -> bool:
    own = (weight, *views)
    if node.kwargs:
        return False
    if node.target in PRODUCTS and len(node.args) == PRODUCTS[node.target]:
        return node.args[-1] in own and not any(argument in own for argument in node.args[:-1])
    return node.target is LOOKUP and node.args[0] is weight and node.args[1] not in own


def _makes_rows(gradient: fx.Node, weight: Tensor) -> bool:
    value = gradient.meta["val"]
    if len(gradient.users) > 1 or value.shape != weight.shape or not value.is_contiguous() or gradient.kwargs:
        return False
    if gradient.target is LOOKUP_GRADIENT:
        return not gradient.args[4]  # scales by the count of each index, which is of all blocks
    return gradient.target is aten.mm.default
