"""Replace a write into part of a value, which is read again as a whole, by a new value of the whole.

    v = slice(x, 1, 1)                    v = slice(x, 1, 1)
    w = copy_(v, y)               ->      w = copy(v, y)
    r = relu(x)                           s = slice_scatter(x, w, 1, 1)
                                          r = relu(s)

Models shift their labels in this way, fill padded rows, and write the results of a loop into one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses import FakeTensorMode

from ..graph.nodes import allocates_nothing, aten, fake_result, storages

Inverse = tuple[OpOverload, tuple[Any, ...]]  # an op, and its arguments after the written part

SCATTERS: Mapping[Any, OpOverload] = {
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.select.int: aten.select_scatter.default,
    aten.diagonal.default: aten.diagonal_scatter.default,
}


def base_of(written: fx.Node) -> fx.Node | None:
    """Return the value that a written view is part of; None if a write into it can't be a new value."""
    node = written
    while allocates_nothing(node):
        if not _is_view(node) or not (node.target in SCATTERS or node.target in INVERSES):
            return None
        node = node.all_input_nodes[0]
    return node if node.op == "call_function" and isinstance(node.meta["val"], Tensor) else None


class ViewWriter:
    """Inserts the values that follow from a write into a view, right behind it, and removes them if one can't be.

    Attributes:
        inserted: in order.
    """

    def __init__(self, write: fx.Node, mode: FakeTensorMode) -> None:
        self.write, self.mode = write, mode
        self.inserted: list[fx.Node] = []

    @property
    def last(self) -> fx.Node:
        """The latest new value."""
        return self.inserted[-1] if self.inserted else self.write

    def insert_whole(self, written: fx.Node) -> fx.Node:
        """Insert the new values of all that `written` is a view of, and return that of the whole.

        Raises:
            RuntimeError: a view has no inverse on these strides.
        """
        view = written
        while allocates_nothing(view):
            source: Any = view.args[0]
            if (scatter := SCATTERS.get(view.target)) is not None:
                self._insert(scatter, (source, self.last, *view.args[1:]), view.kwargs)
            else:
                inverse, rest = INVERSES[view.target](source.meta["val"], view.args[1:])
                self._insert(inverse, (self.last, *rest), {})
            view = source
        return self.last

    def insert_view(self, holder: fx.Node, base: fx.Node, whole: fx.Node) -> fx.Node:
        """Insert and return the view of `whole` that `holder` is of `base`.

        Raises:
            RuntimeError: it is no chain of views.
        """
        chain = [holder]
        while chain[-1] is not base:
            if not allocates_nothing(chain[-1]) or not _is_view(chain[-1]):
                raise RuntimeError(f"{holder} is no view of {base}")
            chain.append(chain[-1].args[0])  # type: ignore[arg-type]
        value = whole
        for view in reversed(chain[:-1]):
            value = self._insert(view.target, (value, *view.args[1:]), view.kwargs)
        return value

    def remove(self) -> None:
        """Remove all inserted nodes."""
        for node in reversed(self.inserted):
            node.graph.erase_node(node)

    def _insert(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> fx.Node:
        with self.write.graph.inserting_after(self.last):
            node = self.write.graph.call_function(target, args, dict(kwargs))
        node.meta = dict(self.write.meta)
        self.inserted.append(node)
        node.meta["val"] = fake_result(node, self.mode)
        return node


def _is_view(node: fx.Node) -> bool:
    """Return True for an op that views its first argument, and reads no other."""
    is_op = node.op == "call_function" and isinstance(node.target, OpOverload)
    return is_op and node.all_input_nodes == [node.args[0]] and len(storages(node)) == 1


def _view(source: Tensor, rest: Sequence[Any]) -> Inverse:
    return aten.view.default, (list(source.shape),)


def _unsqueeze(source: Tensor, rest: Sequence[Any]) -> Inverse:
    return aten.squeeze.dim, tuple(rest)


def _squeeze(source: Tensor, rest: Sequence[Any]) -> Inverse:
    return aten.view.default, (list(source.shape),)


def _transpose(source: Tensor, rest: Sequence[Any]) -> Inverse:
    return aten.transpose.int, tuple(rest)


def _permute(source: Tensor, rest: Sequence[Any]) -> Inverse:
    order = [dim % source.dim() for dim in rest[0]]
    return aten.permute.default, ([order.index(dim) for dim in range(source.dim())],)


def _same(source: Tensor, rest: Sequence[Any]) -> Inverse:
    return aten.alias.default, ()


def _t(source: Tensor, rest: Sequence[Any]) -> Inverse:
    return aten.t.default, ()


# Views of all elements, and the views that take a value of them back.
INVERSES: Mapping[Any, Callable[[Tensor, Sequence[Any]], Inverse]] = {
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.dim: _squeeze,
    aten.transpose.int: _transpose,
    aten.permute.default: _permute,
    aten.t.default: _t,
    aten.alias.default: _same,
    aten.detach.default: _same,
}
