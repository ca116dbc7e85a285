"""Write to a buffer in place where its old value is not read later, so that a step takes no more memory than eager.

    mul = mul(mean, 0.9)                           mul_ = mul_(mean, 0.9)
    add = add(mul, x)                       ->     add_ = add_(mean, x)
    copy_(mean, add)

    copy = copy(slice(queue, 0, 0, 4), x)          view = slice(queue, 0, 0, 4)
    scatter = slice_scatter(queue, copy, 0, 0, 4)  copy_(view, x)
    ...                                     ->     ...
    copy_(queue, scatter)

A chain of new values that ends in the buffer runs in the buffer, each op where it was. The chain stays if an older
value is read after the next one, or if the step returns one. It also stays if ops that read one would make more bytes
than the buffer has: they can't run again, since the buffer may have changed. Other copies into buffers move up.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses import FakeTensorMode

from ..graph.aten_shims import COPY_WITH_STRIDES
from ..graph.nodes import (
    all_storages,
    allocates_nothing,
    argument_types,
    aten,
    fake_result,
    is_random,
    storages,
    tensors,
)
from ..graph.provenance import PROVENANCE, is_backward

# An op that writes into part of a value, and the op that views that part.
VIEW_OF_SCATTER: Mapping[Any, OpOverload] = {
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.select_scatter.default: aten.select.int,
    aten.diagonal_scatter.default: aten.diagonal.default,
    aten.as_strided_scatter.default: aten.as_strided.default,
}
# Besides pointwise ops: these copy the old value and write into the copy.
WRITERS = ("copy", "fill", "zero", "index_put", "index_copy", "index_fill", "index_add", "scatter", "scatter_add")


def reinplace(
    graph: fx.Graph, mode: FakeTensorMode, buffers: Iterable[fx.Node], assigned: Container[fx.Node],
    after: fx.Node | None = None,
) -> None:  # fmt: skip
    """Write to the buffers, placeholders into which a graph copies new values, in place.

    Eager gives another tensor to those in `assigned`, so they are copied into. It changes the others in place with the
    same ops, and so with the same bits. Nothing is written before the node `after`.
    """
    changed = set[int]()
    for buffer in buffers:
        copy = next(user for user in buffer.users if _copies_into(user, buffer))
        chain = _chain(buffer, copy) if buffer not in assigned else []
        is_late = after is None or not chain or chain[0] > after
        if chain and is_late and _may_be_in_place(graph, buffer, chain):
            changed |= all_storages(chain)
            _run_in(buffer, chain, mode)
            graph.erase_node(copy)
        else:
            _move_up(buffer, copy, after)
    if changed:
        _update_views(graph, mode, changed)


def reinplace_made(graph: fx.Graph, mode: FakeTensorMode) -> None:
    """Write parts of values that ops make in place, as code does that fills a tensor part by part.

        out = zeros(1024, 64)
        one = slice_scatter(out, y, 0, 0, 256)       ->    copy_(slice(out, 0, 0, 256), y)
        two = slice_scatter(one, z, 0, 256, 512)           copy_(slice(out, 0, 256, 512), z)

    In forward only what backward does not read, since it could not be recomputed.
    """
    changed = set[int]()
    for node in list(graph.nodes):
        base = _written(node) if node.target in VIEW_OF_SCATTER and node.users else None
        if base is None or not _is_made(base):
            continue
        chain = _scatters(base, node)
        if _is_of_one_phase(base, chain) and _may_be_in_place(graph, base, chain, returned=True):
            changed |= all_storages(chain)
            _run_in(base, chain[:-1], mode)
            # What is read later, or returned, comes behind the last write.
            writer = _ReinplaceRewriter(chain[-1], mode)
            writer.put(base, base, chain[-1])
            chain[-1].replace_all_uses_with(writer.add(aten.alias.default, base))
    if changed:
        _update_views(graph, mode, changed)


def _is_made(node: fx.Node) -> bool:
    """Return True if an op of torch's has made a value to which nothing else refers."""
    target = node.target
    is_plain = isinstance(target, OpOverload) and target.namespace == "aten" and not target._schema.is_mutable
    return (
        is_plain
        and isinstance(node.meta.get("val"), Tensor)
        and not storages(node) & all_storages(node.all_input_nodes)
    )


def _scatters(base: fx.Node, first: fx.Node) -> list[fx.Node]:
    """Return the values that are each the one before with a part written to."""
    chain = [first]
    while True:
        later = [user for user in chain[-1].users if user.target in VIEW_OF_SCATTER and _written(user) is chain[-1]]
        if len(later) != 1:
            return chain if all(_is_alike(each, base) for each in chain) else []
        chain += later


def _is_of_one_phase(base: fx.Node, chain: list[fx.Node]) -> bool:
    if not chain or is_backward(base) is not is_backward(chain[-1]):
        return False
    return is_backward(base) or not any(
        is_backward(user)
        for holders in _holders(base.graph, {chain[-1]}).values()
        for holder in holders
        for user in holder.users
    )


def _chain(buffer: fx.Node, copy: fx.Node) -> list[fx.Node]:
    """Return the new values of a buffer, in order, if each is the one before it with something written to it."""
    links: list[fx.Node] = []
    value: Any = copy.args[1]
    while value is not buffer:
        if not isinstance(value, fx.Node) or not _is_alike(value, buffer):
            return []
        links.append(value)
        value = _written(_skip_copies(value))
    return links[::-1]


def _written(value: fx.Node) -> fx.Node | None:
    """Return the value that an op would change if it worked in place."""
    if value.kwargs if value.target in VIEW_OF_SCATTER else _in_place(value) is None:
        return None
    base = value.args[0]
    return _skip_copies(base) if isinstance(base, fx.Node) else None


def _skip_copies(node: fx.Node) -> fx.Node:
    """Return a value without copies that only change its strides."""
    while node.target is COPY_WITH_STRIDES:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _is_alike(node: fx.Node, other: fx.Node) -> bool:
    return _fits(node, other) and node.meta["val"].stride() == other.meta["val"].stride()


def _fits(node: fx.Node, other: fx.Node) -> bool:
    value, target = node.meta.get("val"), other.meta["val"]
    return isinstance(value, Tensor) and (value.shape, value.dtype) == (target.shape, target.dtype)


def _in_place(node: fx.Node) -> OpOverload | None:
    """Return `aten.mul_.Tensor` for `aten.mul.Tensor`; None if no in-place op gives the same bits."""
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "aten" or is_random(node):
        return None
    name = target._schema.name.removeprefix("aten::")
    if torch.Tag.pointwise not in target.tags and name not in WRITERS:
        return None
    result = getattr(getattr(aten, f"{name}_", None), target._overloadname, None)
    return result if result is not None and argument_types(result) == argument_types(target) else None


def _may_be_in_place(graph: fx.Graph, buffer: fx.Node, chain: list[fx.Node], returned: bool = False) -> bool:
    """Return True if all readers would read what they read now, and few bytes become impossible to recompute.

    The last value may be `returned` if it is no input's.
    """
    holders = _holders(graph, {buffer, *chain})
    for old, new in zip([buffer, *chain], chain, strict=False):
        late = {
            user for holder in holders[old] for user in holder.users if user > new and not _copies_into(user, buffer)
        }
        if late:
            return False
    readers = {user for value in chain for holder in holders[value] for user in holder.users} - set(chain)
    if graph.output_node() in readers and not returned:
        return False
    not_recomputable = (
        reader
        for reader in readers - _only_for(chain) - {graph.output_node()}
        if not is_backward(reader) and not allocates_nothing(reader)
    )
    return sum(map(_nbytes, not_recomputable)) <= _nbytes(buffer)


def _holders(graph: fx.Graph, values: set[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Return the nodes that hold the storage of each value."""
    owner = {storage: value for value in values for storage in storages(value)}
    result: dict[fx.Node, list[fx.Node]] = {value: [] for value in values}
    for node in graph.nodes:
        for storage in storages(node) & owner.keys():
            result[owner[storage]].append(node)
    return result


def _copies_into(user: fx.Node, buffer: fx.Node) -> bool:
    return user.target is aten.copy_.default and user.args[0] is buffer


def _only_for(chain: list[fx.Node]) -> set[fx.Node]:
    """Return the values that only the chain uses, and the chain."""
    result, waiting = set(chain), [read for link in chain for read in link.all_input_nodes]
    while waiting:
        node = waiting.pop()
        if node not in result and node.op == "call_function" and result.issuperset(node.users):
            result.add(node)
            waiting += node.all_input_nodes
    return result


def _nbytes(node: fx.Node) -> int:
    return sum(value.numel() * value.element_size() for value in tensors(node))


@dataclass(frozen=True, eq=False)
class _ViewWrite:
    """A view of a value, which may occur in a graph several times."""

    view: OpOverload
    whole: fx.Node | _ViewWrite
    args: tuple[Any, ...]


def _is(old: fx.Node | _ViewWrite, node: fx.Node) -> bool:
    """Return True if a node is this value, or this view of one."""
    if isinstance(old, fx.Node):
        return node is old
    if node.target is not old.view or node.kwargs or tuple(node.args[1:]) != old.args:
        return False
    return _is(old.whole, _skip_copies(node.args[0]))  # type: ignore[arg-type]


def _run_in(buffer: fx.Node, chain: list[fx.Node], mode: FakeTensorMode) -> None:
    for link in chain:
        _ReinplaceRewriter(link, mode).put(buffer, buffer, link)
        link.replace_all_uses_with(buffer)


@dataclass(frozen=True)
class _ReinplaceRewriter:
    """Inserts in-place ops before a node of the chain."""

    link: fx.Node
    mode: FakeTensorMode

    def put(self, into: fx.Node, old: fx.Node | _ViewWrite, value: fx.Node) -> None:
        """Let `into`, a view of a buffer that holds `old`, hold `value`."""
        node, is_old = _skip_copies(value), partial(_is, old)
        written = _written(node)
        if is_old(node):
            return
        if node.target is aten.copy.default:
            source: Any = node.args[1]
            if not is_old(_skip_copies(source)):  # `buffer[i] += x` ends with buffer[i] = buffer[i]
                self.add(aten.copy_.default, into, *node.args[1:])
        elif node.target in VIEW_OF_SCATTER and written is not None and is_old(written):
            view, args = VIEW_OF_SCATTER[node.target], tuple(node.args[2:])
            self.put(self.add(view, into, *args), _ViewWrite(view, old, args), node.args[1])  # type: ignore[arg-type]
        elif self._is_from(node, is_old) and _fits(value, into):
            self.put(into, old, node.args[0])  # type: ignore[arg-type]
            self.add(_in_place(node), into, *node.args[1:], **node.kwargs)
        else:
            self.add(aten.copy_.default, into, value)

    def _is_from(self, node: fx.Node, is_old: Callable[[fx.Node], bool]) -> bool:
        """Return True if a value is computed from the old one by in-place ops, and no value between is read."""
        while not is_old(node):
            base = _written(node)
            is_read = node is not _skip_copies(self.link) and len(node.users) > 1
            if base is None or node.target in VIEW_OF_SCATTER or is_read:
                return False
            node = base
        return True

    def add(self, target: OpOverload | None, *args: Any, **kwargs: Any) -> fx.Node:
        assert target is not None
        with self.link.graph.inserting_before(self.link):
            node = self.link.graph.call_function(target, args, kwargs)
        node.meta[PROVENANCE] = self.link.meta[PROVENANCE]
        node.meta["val"] = fake_result(node, self.mode)
        return node


def _move_up(buffer: fx.Node, copy: fx.Node, after: fx.Node | None) -> None:
    """Move a copy into a buffer right behind the last reader of the old value, so that the new one can be freed, and
    behind the node `after`."""
    buffer_storages = storages(buffer)
    readers = {user for node in _aliases(buffer, buffer_storages) for user in node.users if user < copy}
    last = max({copy.args[1], *readers, *filter(None, [after])})  # type: ignore[type-var]
    if last.op == "call_function":  # type: ignore[union-attr]
        last.append(copy)  # type: ignore[union-attr]


def _aliases(node: fx.Node, buffer_storages: set[int]) -> Iterator[fx.Node]:
    yield node
    for user in node.users:
        if user.target is not aten.copy_.default and storages(user) & buffer_storages:
            yield from _aliases(user, buffer_storages)


def _update_views(graph: fx.Graph, mode: FakeTensorMode, changed: set[int]) -> None:
    """Let views of values that are now in a buffer be views of the buffer."""
    for node in graph.nodes:
        if node.op == "call_function" and node.users and storages(node) & changed:
            node.meta["val"] = fake_result(node, mode)
