"""Write losses over classes so that only what reads all classes has the rows of the batch.

    l, n = nll_loss_forward(p, y)              one = where(y == ignored, y, 0)              # the class of [rows, 1]
    ...                                        g = gather(p, 1, where(y == ignored, 0, y))  # [rows, 1]
    d = nll_loss_backward(t, p, y, n)    ->    l, _ = nll_loss_forward(g, one)
                                               _, n = nll_loss_forward(zeros, one)
                                               d = nll_loss_backward(t, p, y, n)

A loss of each row is -g, and 0 where it is ignored. A loss of all adds up the same numbers in the same order, so it
has the same bits. The number of rows that count, `n`, no longer depends on p: parts of the rows can have their gradient
before the loss of all is known.
"""

from __future__ import annotations

import operator

from torch import Tensor, fx

from ..graph.nodes import aten, fake_result
from ..graph.rewrite import fake_mode

LOSS = aten.nll_loss_forward.default


def write_losses_by_row(graph: fx.Graph) -> None:
    """Rewrite the losses of a graph that have no weights of classes. Changes the graph."""
    for node in graph.find_nodes(op="call_function", target=LOSS):
        values, target = (read.meta["val"] for read in node.all_input_nodes[:2])
        if node.args[2] is None and values.dim() == 2 and target.dim() == 1:
            _rewrite(node)


def _rewrite(node: fx.Node) -> None:
    graph, mode = node.graph, fake_mode(node.graph)
    values, target = node.all_input_nodes[:2]
    reduction, ignored = node.args[3:5]
    value: Tensor = values.meta["val"]

    def add(target: object, *args: object, **kwargs: object) -> fx.Node:
        new = graph.call_function(target, args, kwargs)  # type: ignore[arg-type]
        new.meta = {**node.meta}
        new.meta["val"] = fake_result(new, mode)
        return new

    with graph.inserting_before(node):
        is_ignored = add(aten.eq.Scalar, target, ignored)
        one_class = add(aten.masked_fill.Scalar, add(aten.mul.Scalar, target, 0), is_ignored, ignored)
        index = add(aten.unsqueeze.default, add(aten.masked_fill.Scalar, target, is_ignored, 0), 1)
        picked = add(aten.gather.default, values, 1, index)
        zeros = add(aten.zeros.default, [value.shape[0], 1], dtype=value.dtype, device=value.device)
        counted = add(LOSS, zeros, one_class, None, reduction, ignored)
        if reduction == 0:
            loss = add(aten.masked_fill.Scalar, add(aten.neg.default, add(aten.squeeze.dim, picked, 1)), is_ignored, 0)
        else:
            loss = add(operator.getitem, add(LOSS, picked, one_class, None, reduction, ignored), 0)
        weight = add(operator.getitem, counted, 1)
    for item in list(node.users):
        item.replace_all_uses_with(weight if item.args[1] == 1 else loss)
        graph.erase_node(item)
    graph.erase_node(node)
