"""Replace in-place ops on values that forward or backward makes by their functional form.

    e = empty_like(x)                 e = empty_like(x)
    b = bernoulli_(e, p)      ->      b = bernoulli(e, p)
    d = div_(b, q)                    d = div(b, q)

    copy_(slice(x, 1, 1), y)  ->      s = slice_scatter(x, y, 1, 1), which later ops read for x

    i, f = unsafe_split(gates, n)     i, f = unsafe_split(gates, n)
    s = sigmoid_(i)           ->      s = sigmoid(i); l = laid(s, i's strides)

Dropout on the CPU does the first, and `relu(inplace=True)`; an LSTM cell does the second, with gates that share no
element. A graph without other in-place ops needs no second trace, which is half of the time of a capture.

Replace a write into part of a value, which is read again as a whole, by a new value of the whole.

    v = slice(x, 1, 1)                    v = slice(x, 1, 1)
    w = copy_(v, y)               ->      w = copy(v, y)
    r = relu(x)                           s = slice_scatter(x, w, 1, 1)
                                          r = relu(s)

Models shift their labels in this way, fill padded rows, and write the results of a loop into one tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses import FakeTensorMode

from ..graph.aten_shims import COPY_WITH_STRIDES
from ..graph.nodes import (
    SPLITS,
    allocates_nothing,
    argument_types,
    aten,
    changes_inputs,
    fake_result,
    storages,
    written_inputs,
)

Inverse = tuple[OpOverload, tuple[Any, ...]]  # an op, and its arguments after the written part

SCATTERS: Mapping[Any, OpOverload] = {
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.select.int: aten.select_scatter.default,
    aten.diagonal.default: aten.diagonal_scatter.default,
}


def replace_inplace(graph: fx.Graph, mode: FakeTensorMode) -> bool:
    """Replace in-place ops up to the first that can't be; return True if all were replaced."""
    for node in graph.find_nodes(op="call_function", target=aten.bernoulli_.float):
        if not node.meta["val"].is_contiguous():
            _make_contiguous(node, mode)
    return all(map(_InplaceRewriter(graph, mode).visit, graph.nodes))


def _make_contiguous(node: fx.Node, mode: FakeTensorMode) -> None:
    """Draw through a view in memory order, as `bernoulli_` does; `bernoulli` would not."""
    value: Tensor = node.meta["val"]
    order: list[Any] = sorted(range(value.dim()), key=value.stride, reverse=True)
    with node.graph.inserting_before(node):
        view = node.graph.call_function(aten.permute.default, (node.args[0], order))
    with node.graph.inserting_after(node):
        back = node.graph.call_function(aten.permute.default, (node, [order.index(i) for i in range(len(order))]))
    node.replace_all_uses_with(back, delete_user_cb=lambda user: user is not back)
    node.args = (view, *node.args[1:])
    for changed in (view, node, back):
        changed.meta = node.meta | {"val": fake_result(changed, mode)}


class _InplaceRewriter:
    """Walks a graph once.

    `split` are storages that stand for those of new values from here on; `copies` are nodes that restore strides.
    """

    def __init__(self, graph: fx.Graph, mode: FakeTensorMode) -> None:
        self.mode = mode
        self.place = {node: i for i, node in enumerate(graph.nodes)}
        self.holders: dict[int, list[fx.Node]] = {}
        self.split: set[int] = set()
        self.copies: set[fx.Node] = set()
        for node in graph.nodes:
            self._add_holder(node)

    def visit(self, node: fx.Node) -> bool:
        """Return True if the node changes no input, or was replaced."""
        if changes_inputs(node):
            return self._replace(node)
        if node.op == "call_function" and storages(node) & self.split:
            self._set_value(node, fake_result(node, self.mode))
        return True

    def _replace(self, node: fx.Node) -> bool:
        written, target, before = written_inputs(node), _functional(node.target), node.meta["val"]
        if target is None or len(written) != 1:
            return False
        if torch.Tag.inplace_view in getattr(node.target, "tags", ()):
            return self._replace_view(node, written[0], target)
        if not self._is_last_use(written[0], node):
            return self._replace_whole(node, written[0], target)
        inplace = node.target, node.args
        node.target, node.args = target, (*node.args, *_omitted(node))
        new = fake_result(node, self.mode)
        has_same_strides = new.stride() == before.stride()
        if (new.shape, new.dtype) != (before.shape, before.dtype) or not (
            has_same_strides or self._may_copy(written[0])
        ):
            node.target, node.args = inplace
            return False
        self._set_value(node, new)
        if not has_same_strides:
            self._restore_strides(node, before)
        return True

    def _replace_view(self, node: fx.Node, written: fx.Node, target: OpOverload) -> bool:
        """Replace an op that changes sizes and strides of a tensor by a view, if the tensor is not read as before."""
        if written.op != "call_function" or any(self.place[user] > self.place[node] for user in written.users):
            return False
        node.target = target
        node.meta["val"] = fake_result(node, self.mode)
        return True

    def _replace_whole(self, node: fx.Node, written: fx.Node, target: OpOverload) -> bool:
        """Replace a write into a value that is read later through others that hold it, by new values of these."""
        base = base_of(written)
        if base is None:
            return False
        later = self._read_later(base, self.place[node])
        if later is None:
            return False
        inplace, before, writer = (node.target, node.args), node.meta["val"], ViewWriter(node, self.mode)
        node.target, node.args = target, (*node.args, *_omitted(node))
        try:
            node.meta["val"] = fake_result(node, self.mode)
            whole = writer.insert_whole(written)
            if _form(whole) != _form(base):
                raise RuntimeError("the whole would have other strides")
            new = {holder: writer.insert_view(holder, base, whole) for holder in later}
            new[node] = writer.insert_view(written, base, whole)
        except RuntimeError:
            writer.remove()
            (node.target, node.args), node.meta["val"] = inplace, before
            return False
        self._redirect(node, base, new, writer.inserted)
        return True

    def _read_later(self, base: fx.Node, now: int) -> list[fx.Node] | None:
        """Return the earlier nodes with the storage of `base` that are read after `now`; None if one has others too."""
        (storage,) = storages(base)
        holders = dict.fromkeys(holder for holder in self.holders[storage] if storage in storages(holder))
        if any(storages(holder) != {storage} for holder in holders):
            return None
        earlier = [holder for holder in holders if self.place[holder] < now]
        return [holder for holder in earlier if any(self.place[user] > now for user in holder.users)]

    def _redirect(self, node: fx.Node, base: fx.Node, new: dict[fx.Node, fx.Node], inserted: list[fx.Node]) -> None:
        """Let what reads one of these values after `node` read its new one."""
        now = self.place[node]
        self.split |= storages(base)
        for value in [node, *inserted]:
            self.place[value] = now
            self._add_holder(value)
        for holder, value in new.items():
            if value is not holder:
                holder.replace_all_uses_with(value, delete_user_cb=lambda user: self.place[user] > now)

    def _may_copy(self, written: fx.Node) -> bool:
        """Return True if nothing else holds the elements that are written, so that a copy may take their place."""
        return _is_part(written) or written in self.copies

    def _restore_strides(self, node: fx.Node, before: Tensor) -> None:
        """Let the readers of a node read a copy with the strides that its value has in eager."""
        with node.graph.inserting_after(node):
            copy = node.graph.call_function(COPY_WITH_STRIDES, (node, list(before.stride())))
        node.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)
        copy.meta = dict(node.meta)
        self.place[copy] = self.place[node]
        self.copies.add(copy)
        self._set_value(copy, fake_result(copy, self.mode))

    def _is_last_use(self, written: fx.Node, node: fx.Node) -> bool:
        """Return True if, after `node`, the storage of `written` is read only through `node`."""
        now = self.place[node]
        same_storage = [
            holder
            for storage in storages(written)
            for holder in self.holders[storage]
            if storage in storages(holder) and not _are_disjoint(holder, written)
        ]
        earlier = [holder for holder in same_storage if self.place[holder] < now]
        owned = all(holder.op == "call_function" for holder in same_storage)
        return owned and all(self.place[user] <= now for holder in earlier for user in holder.users)

    def _set_value(self, node: fx.Node, value: Any) -> None:
        self.split |= storages(node)
        node.meta["val"] = value
        self._add_holder(node)

    def _add_holder(self, node: fx.Node) -> None:
        for storage in storages(node):
            self.holders.setdefault(storage, []).append(node)


def _form(node: fx.Node) -> object:
    value: Tensor = node.meta["val"]
    return value.dtype, value.shape, value.stride(), value.storage_offset()


def _is_part(node: fx.Node) -> bool:
    """Return True if the node is one of the parts of a split."""
    return node.target is operator.getitem and isinstance(node.args[0], fx.Node) and node.args[0].target in SPLITS


def _are_disjoint(one: fx.Node, other: fx.Node) -> bool:
    """Return True if both are parts of the same split, and not the same part."""
    return _is_part(one) and _is_part(other) and one.args[0] is other.args[0] and bool(one.args[1] != other.args[1])


def _functional(target: Any) -> OpOverload | None:
    """Return `aten.div.Scalar` for `aten.div_.Scalar`, and the view for `aten.t_`; None if there is no such op."""
    if not isinstance(target, OpOverload) or not target._opname.endswith("_"):
        return None
    packet = getattr(getattr(torch.ops, target.namespace), target._opname[:-1], None)
    changes_sizes = torch.Tag.inplace_view in target.tags
    for name in packet.overloads() if packet is not None else ():
        overload = getattr(packet, name)
        schema = overload._schema
        if (
            not schema.is_mutable
            and argument_types(overload) == argument_types(target)
            and (any(result.alias_info is not None for result in schema.returns) == changes_sizes)
        ):
            return overload
    return None


def _omitted(node: fx.Node) -> list[Any]:
    """Return the defaults of positional arguments that were not given; the functional op may have none."""
    positional = [argument for argument in node.target._schema.arguments if not argument.kwarg_only]  # type: ignore[union-attr]
    rest = takewhile(lambda argument: argument.name not in node.kwargs, positional[len(node.args) :])
    return [argument.default_value for argument in rest]


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
