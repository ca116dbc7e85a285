"""Ops that work in place on a value that nobody else reads any more -> the same ops making a new value.

    e = empty_like(x)                 e = empty_like(x)
    b = bernoulli_(e, p)      ->      b = bernoulli(e, p)
    d = div_(b, q)                    d = div(b, q)

This is what dropout does on the CPU, and `relu(inplace=True)`.  Where these are all the ops in place that a graph has,
it needs no second trace, which is half of the time of a capture.
"""

from __future__ import annotations

from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses import FakeTensorMode

from ..graph.nodes import aten, changes_inputs, fake_result, storages, written_inputs


def replace_inplace(graph: fx.Graph, mode: FakeTensorMode) -> bool:
    """Replace what can be replaced so, up to the first op that can't; whether all could."""
    for node in graph.find_nodes(op="call_function", target=aten.bernoulli_.float):
        if not node.meta["val"].is_contiguous():
            _straighten(node, mode)
    return all(map(_InplaceRewriter(graph, mode).visit, graph.nodes))


def _straighten(node: fx.Node, mode: FakeTensorMode) -> None:
    """Draw through a view that is ordered as the memory is: so `bernoulli_` draws, but `bernoulli` does not."""
    value: Tensor = node.meta["val"]
    order: list[Any] = sorted(range(value.dim()), key=value.stride, reverse=True)
    with node.graph.inserting_before(node):
        view = node.graph.call_function(aten.permute.default, (node.args[0], order))
    with node.graph.inserting_after(node):
        back = node.graph.call_function(aten.permute.default, (node, [order.index(i) for i in range(len(order))]))
    node.replace_all_uses_with(back, delete_user_cb=lambda user: user is not back)
    node.args = (view, *node.args[1:])
    for fresh in (view, node, back):
        fresh.meta = node.meta | {"val": fake_result(fresh, mode)}


class _InplaceRewriter:
    """Walks through a graph once.  `split` are the storages that from here on stand for those of new values."""

    def __init__(self, graph: fx.Graph, mode: FakeTensorMode) -> None:
        self.mode = mode
        self.place = {node: i for i, node in enumerate(graph.nodes)}
        self.holders: dict[int, list[fx.Node]] = {}
        self.split: set[int] = set()
        for node in graph.nodes:
            self._file(node)

    def visit(self, node: fx.Node) -> bool:
        """Whether the node changes none of its inputs, or was replaced."""
        if changes_inputs(node):
            return self._replace(node)
        if node.op == "call_function" and storages(node) & self.split:
            self._move(node, fake_result(node, self.mode))
        return True

    def _replace(self, node: fx.Node) -> bool:
        written, target, before = written_inputs(node), _functional(node.target), node.meta["val"]
        if target is None or len(written) != 1 or not self._is_last_use(written[0], node):
            return False
        inplace = node.target, node.args
        node.target, node.args = target, (*node.args, *_omitted(node))
        new = fake_result(node, self.mode)
        if (new.shape, new.stride(), new.dtype) != (before.shape, before.stride(), before.dtype):
            node.target, node.args = inplace
            return False
        self._move(node, new)
        return True

    def _is_last_use(self, written: fx.Node, node: fx.Node) -> bool:
        """Whether what `written` holds is read after `node` under no other name than that of `node`."""
        now = self.place[node]
        held = [holder for storage in storages(written) for holder in self.holders[storage]]
        earlier = [holder for holder in held if self.place[holder] < now]
        owned = all(holder.op == "call_function" for holder in held)
        return owned and all(self.place[user] <= now for holder in earlier for user in holder.users)

    def _move(self, node: fx.Node, value: Any) -> None:
        self.split |= storages(node)
        node.meta["val"] = value
        self._file(node)

    def _file(self, node: fx.Node) -> None:
        for storage in storages(node):
            self.holders.setdefault(storage, []).append(node)


def _functional(target: Any) -> OpOverload | None:
    """`aten.div.Scalar` for `aten.div_.Scalar`; None if there is no such op."""
    if not isinstance(target, OpOverload) or not target._opname.endswith("_"):
        return None
    packet = getattr(getattr(torch.ops, target.namespace), target._opname[:-1], None)
    for name in packet.overloads() if packet is not None else ():
        found = getattr(packet, name)
        makes_new = not found._schema.is_mutable and all(made.alias_info is None for made in found._schema.returns)
        if makes_new and _arguments(found) == _arguments(target):
            return found
    return None


def _omitted(node: fx.Node) -> list[Any]:
    """The default values of positional arguments that were not given; the other op may have no defaults."""
    positional = [argument for argument in node.target._schema.arguments if not argument.kwarg_only]  # type: ignore[union-attr]
    rest = takewhile(lambda argument: argument.name not in node.kwargs, positional[len(node.args) :])
    return [argument.default_value for argument in rest]


def _arguments(target: OpOverload) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in target._schema.arguments]
