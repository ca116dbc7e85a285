"""Write to a buffer in the buffer, where nobody wants its old value: a captured step takes no more than eager does.

    mul = mul(mean, 0.9)                           mul_ = mul_(mean, 0.9)
    add = add(mul, x)                       ->     add_ = add_(mean, x)
    copy_(mean, add)

    copy = copy(slice(queue, 0, 0, 4), x)          view = slice(queue, 0, 0, 4)
    scatter = slice_scatter(queue, copy, 0, 0, 4)  copy_(view, x)
    ...                                     ->     ...
    copy_(queue, scatter)

A chain of new values that ends in the buffer is run in the buffer, link by link, each where it stood.  It stays as it
is if anything reads an older value behind the next link, if a value of the chain is returned, or if ops that read one
would make more bytes than the buffer has: those can't run again, for the buffer may have changed by then.  What is left
of the copies into buffers stands as early as it may.
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
from ..graph.nodes import all_storages, allocates_nothing, aten, fake_result, is_random, storages, tensors
from ..graph.provenance import PROVENANCE

# What puts a piece into a value, and the op that gives a view of that piece.
PIECES: Mapping[Any, OpOverload] = {
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.select_scatter.default: aten.select.int,
    aten.diagonal_scatter.default: aten.diagonal.default,
    aten.as_strided_scatter.default: aten.as_strided.default,
}
# Besides those that work element by element: torch makes the new value by copying the old one and writing into that.
WRITERS = ("copy", "fill", "zero", "index_put", "index_copy", "index_fill", "index_add", "scatter", "scatter_add")


def reinplace(graph: fx.Graph, mode: FakeTensorMode, buffers: Iterable[fx.Node], assigned: Container[fx.Node]) -> None:
    """Let the buffers, placeholders of a graph that copies new values into them, be written where they are.

    To those that are `assigned` eager gives another tensor, so they are copied into.  All others eager changes in place
    itself, by the ops that are put in place here, and so with the same bits.
    """
    changed = set[int]()
    for buffer in buffers:
        copy = next(user for user in buffer.users if _copies_into(user, buffer))
        chain = _chain(buffer, copy) if buffer not in assigned else []
        if chain and _may_be_in_place(graph, buffer, chain):
            changed |= all_storages(chain)
            _run_in(buffer, chain, mode)
            graph.erase_node(copy)
        else:
            _move_up(buffer, copy)
    if changed:
        _follow(graph, mode, changed)


def _chain(buffer: fx.Node, copy: fx.Node) -> list[fx.Node]:
    """The new values of a buffer, the one that is copied into it last, if each is the one before it, written to."""
    links: list[fx.Node] = []
    value: Any = copy.args[1]
    while value is not buffer:
        if not isinstance(value, fx.Node) or not _lies_alike(value, buffer):
            return []
        links.append(value)
        value = _written(_bare(value))
    return links[::-1]


def _written(value: fx.Node) -> fx.Node | None:
    """The value that an op would change if it worked in place."""
    if value.kwargs if value.target in PIECES else _in_place(value) is None:
        return None
    base = value.args[0]
    return _bare(base) if isinstance(base, fx.Node) else None


def _bare(node: fx.Node) -> fx.Node:
    """A value without the copies that only give it strides."""
    while node.target is COPY_WITH_STRIDES:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _lies_alike(node: fx.Node, other: fx.Node) -> bool:
    one, two = node.meta.get("val"), other.meta["val"]
    if not isinstance(one, Tensor):
        return False
    return (one.shape, one.stride(), one.dtype) == (two.shape, two.stride(), two.dtype)


def _fits(node: fx.Node, other: fx.Node) -> bool:
    one, two = node.meta["val"], other.meta["val"]
    return (one.shape, one.dtype) == (two.shape, two.dtype)


def _in_place(node: fx.Node) -> OpOverload | None:
    """`aten.mul_.Tensor` for an `aten.mul.Tensor`; None if there is no op that gives the same bits in place."""
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "aten" or is_random(node):
        return None
    name = target._schema.name.removeprefix("aten::")
    if torch.Tag.pointwise not in target.tags and name not in WRITERS:
        return None
    found = getattr(getattr(aten, f"{name}_", None), target._overloadname, None)
    return found if found is not None and _arguments(found) == _arguments(target) else None


def _arguments(target: OpOverload) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in target._schema.arguments]


def _may_be_in_place(graph: fx.Graph, buffer: fx.Node, chain: list[fx.Node]) -> bool:
    """Whether all would read what they read now, and few of them could not run again for it."""
    holders = _holders(graph, {buffer, *chain})
    for old, new in zip([buffer, *chain], chain, strict=False):
        late = {
            user for holder in holders[old] for user in holder.users if user > new and not _copies_into(user, buffer)
        }
        if late:
            return False
    readers = {user for value in chain for holder in holders[value] for user in holder.users} - set(chain)
    if graph.output_node() in readers:
        return False
    barred = (
        reader for reader in readers - _only_for(chain) if not _is_backward(reader) and not allocates_nothing(reader)
    )
    return sum(map(_nbytes, barred)) <= _nbytes(buffer)


def _holders(graph: fx.Graph, values: set[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """For each of these values the nodes that hold its storage."""
    owner = {storage: value for value in values for storage in storages(value)}
    found: dict[fx.Node, list[fx.Node]] = {value: [] for value in values}
    for node in graph.nodes:
        for storage in storages(node) & owner.keys():
            found[owner[storage]].append(node)
    return found


def _copies_into(user: fx.Node, buffer: fx.Node) -> bool:
    return user.target is aten.copy_.default and user.args[0] is buffer


def _only_for(chain: list[fx.Node]) -> set[fx.Node]:
    """The values of which nothing but the chain is made, the chain itself included."""
    found, waiting = set(chain), [read for link in chain for read in link.all_input_nodes]
    while waiting:
        node = waiting.pop()
        if node not in found and node.op == "call_function" and found.issuperset(node.users):
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _is_backward(node: fx.Node) -> bool:
    return node.op == "call_function" and node.meta[PROVENANCE]["phase"] == "backward"


def _nbytes(node: fx.Node) -> int:
    return sum(value.numel() * value.element_size() for value in tensors(node))


@dataclass(frozen=True, eq=False)
class _ViewWrite:
    """A piece of a value, as a graph may write it down several times."""

    view: OpOverload
    whole: fx.Node | _ViewWrite
    args: tuple[Any, ...]


def _is(old: fx.Node | _ViewWrite, node: fx.Node) -> bool:
    """Whether a node is this value, or this piece of one."""
    if isinstance(old, fx.Node):
        return node is old
    if node.target is not old.view or node.kwargs or tuple(node.args[1:]) != old.args:
        return False
    return _is(old.whole, _bare(node.args[0]))  # type: ignore[arg-type]


def _run_in(buffer: fx.Node, chain: list[fx.Node], mode: FakeTensorMode) -> None:
    for link in chain:
        _ReinplaceRewriter(link, mode).put(buffer, buffer, link)
        link.replace_all_uses_with(buffer)


@dataclass(frozen=True)
class _ReinplaceRewriter:
    """Writes ops that work in place before a link."""

    link: fx.Node
    mode: FakeTensorMode

    def put(self, into: fx.Node, old: fx.Node | _ViewWrite, value: fx.Node) -> None:
        """Let `into`, a view of a buffer that holds `old`, hold `value`."""
        made, known = _bare(value), partial(_is, old)
        written = _written(made)
        if known(made):
            return
        if made.target is aten.copy.default:
            source: Any = made.args[1]
            if not known(_bare(source)):  # as after `buffer[i] += x`, which ends with buffer[i] = buffer[i]
                self._add(aten.copy_.default, into, *made.args[1:])
        elif made.target in PIECES and written is not None and known(written):
            view, args = PIECES[made.target], tuple(made.args[2:])
            self.put(self._add(view, into, *args), _ViewWrite(view, old, args), made.args[1])  # type: ignore[arg-type]
        elif self._is_from(made, known) and _fits(value, into):
            self.put(into, old, made.args[0])  # type: ignore[arg-type]
            self._add(_in_place(made), into, *made.args[1:], **made.kwargs)
        else:
            self._add(aten.copy_.default, into, value)

    def _is_from(self, made: fx.Node, known: Callable[[fx.Node], bool]) -> bool:
        """Whether a value is made of the old one by ops that may work in place, and nobody reads what lies between."""
        while not known(made):
            base = _written(made)
            if base is None or made.target in PIECES or (made is not _bare(self.link) and len(made.users) > 1):
                return False
            made = base
        return True

    def _add(self, target: OpOverload | None, *args: Any, **kwargs: Any) -> fx.Node:
        assert target is not None
        with self.link.graph.inserting_before(self.link):
            node = self.link.graph.call_function(target, args, kwargs)
        node.meta[PROVENANCE] = self.link.meta[PROVENANCE]
        node.meta["val"] = fake_result(node, self.mode)
        return node


def _move_up(buffer: fx.Node, copy: fx.Node) -> None:
    """Let a copy into a buffer stand right behind the last op that wants the old value, so that the new one can go."""
    held = storages(buffer)
    readers = {user for node in _aliases(buffer, held) for user in node.users if user < copy}
    last = max({copy.args[1], *readers})  # type: ignore[type-var]
    if last.op == "call_function":  # type: ignore[union-attr]
        last.append(copy)  # type: ignore[union-attr]


def _aliases(node: fx.Node, held: set[int]) -> Iterator[fx.Node]:
    yield node
    for user in node.users:
        if user.target is not aten.copy_.default and storages(user) & held:
            yield from _aliases(user, held)


def _follow(graph: fx.Graph, mode: FakeTensorMode, changed: set[int]) -> None:
    """Let the views of what now lies in a buffer be views of the buffer."""
    for node in graph.nodes:
        if node.op == "call_function" and node.users and storages(node) & changed:
            node.meta["val"] = fake_result(node, mode)
