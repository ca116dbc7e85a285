"""Keep the parts of a split that are changed in place in one tensor, as eager does.

    i, f = unsafe_split(gates, 64, 1)               i, f = unsafe_split(gates, 64, 1)
    s = sigmoid(i)                                  s = sigmoid(i)
    j = laid(s, [128, 1])                           t = tanh(f)
    t = tanh(f)                             ->      c = cat([s, t], 1)
    g = laid(t, [128, 1])                           j = slice(c, 1, 0, 64)
                                                    g = slice(c, 1, 64, 128)

Cells of recurrent nets change their gates so.  With gaps for the other parts, n parts would take n times the bytes of
all, and kernels have other last bits without gaps.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import fx
from torch._subclasses import FakeTensorMode

from ..graph.aten_shims import COPY_WITH_STRIDES
from ..graph.nodes import SPLITS, aten, fake_result, has_same_strides

Parts = dict[int, fx.Node]  # new values of parts of one split, by number


def merge_parts(graph: fx.Graph, mode: FakeTensorMode) -> None:
    """Let copies of parts share a tensor, where they do in eager."""
    copies: dict[fx.Node, list[tuple[int, fx.Node]]] = {}
    for copy in graph.find_nodes(op="call_function", target=COPY_WITH_STRIDES):
        is_returned = any(user.op == "output" for user in copy.users)
        if not is_returned and (part := _part_of(copy)) is not None and _is_like(part, copy):
            copies.setdefault(part.args[0], []).append((part.args[1], copy))  # type: ignore[arg-type]
    if not copies:
        return
    place = {node: i for i, node in enumerate(graph.nodes)}
    for split, found in copies.items():
        if _is_dense(split):
            for group in list(_groups(found, place)):
                _merge(split, group, place, mode)


def _part_of(copy: fx.Node) -> fx.Node | None:
    """Return the part of a split whose new value is copied."""
    node: Any = copy
    while node.target is COPY_WITH_STRIDES:
        changed = node.args[0]
        if changed.op != "call_function" or not changed.args or not isinstance(changed.args[0], fx.Node):
            return None
        node = changed.args[0]
    return node if node.target is operator.getitem and node.args[0].target in SPLITS else None


def _is_like(part: fx.Node, copy: fx.Node) -> bool:
    value, other = part.meta["val"], copy.meta["val"]
    return value.dtype == other.dtype and has_same_strides(value, other)


def _is_dense(split: fx.Node) -> bool:
    """Return True if the parts have the strides of those of a contiguous tensor, all known as numbers."""
    sizes: list[Any] = list(split.args[0].meta["val"].shape)  # type: ignore[union-attr]
    strides = [1]
    for size in reversed(sizes[1:]):
        strides.insert(0, strides[0] * size)
    known = all(isinstance(number, int) for number in (*strides, sizes[_dim(split)]))
    return known and all(list(part.stride()) == strides for part in split.meta["val"])


def _dim(split: fx.Node) -> int:
    dim: int = split.args[2] if len(split.args) > 2 else split.kwargs.get("dim", 0)  # type: ignore[assignment]
    return dim


def _groups(found: Sequence[tuple[int, fx.Node]], place: Mapping[fx.Node, int]) -> Iterator[Parts]:
    """Yield the values that exist together before one of them is read, if there are several."""
    changed_again = {copy.args[0].args[0] for _, copy in found}  # type: ignore[union-attr]
    group: Parts = {}
    for number, copy in found:
        if copy in changed_again:
            continue
        is_late = any(place[user] < place[copy] for each in group.values() for user in each.users)
        if is_late or number in group:
            yield from [group] if len(group) > 1 else []
            group = {}
        group[number] = copy
    yield from [group] if len(group) > 1 else []


def _merge(split: fx.Node, group: Parts, place: Mapping[fx.Node, int], mode: FakeTensorMode) -> None:
    """Let the parts of a new tensor take the place of the copies, and of the other parts that are read later."""
    graph, dim, last = split.graph, _dim(split), max(group.values(), key=lambda copy: place[copy])
    now, meta = place[last], last.meta
    others = {node.args[1]: node for node in split.users if node.target is operator.getitem}

    def add(target: Any, *args: Any) -> fx.Node:
        node = graph.call_function(target, args)
        node.meta = dict(meta)
        node.meta["val"] = fake_result(node, mode)
        return node

    with graph.inserting_before(last):
        values, end = [], 0
        for i in range(len(split.meta["val"])):
            values.append(group[i].args[0] if i in group else others.get(i) or add(operator.getitem, split, i))
        whole = add(aten.cat.default, values, dim)
        for i, part in enumerate(split.meta["val"]):
            begin, end = end, end + part.shape[dim]
            before = group.get(i) or others.get(i)
            if before is not None and any(place.get(user, 0) > now for user in before.users):
                new = add(aten.slice.Tensor, whole, dim, begin, end)
                before.replace_all_uses_with(new, delete_user_cb=lambda user: place.get(user, 0) > now)
    for copy in group.values():
        if not copy.users:
            graph.erase_node(copy)
