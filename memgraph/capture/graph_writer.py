"""A graph with room beside it: new nodes are put where forward ends, or behind the gradient that they copy.

mm = aten.mm(x, d)                       mm = aten.mm(x, d)
...                             ->       ...
add_ = copy_(steps, add)                 grad = clone(mm)
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses import FakeTensorMode

from ..errors import CaptureError
from ..graph.nodes import all_storages, aten, fake_result, storages
from ..graph.provenance import PROVENANCE


class GraphWriter:
    """A graph under the pen.  `turn` is where backward begins; each new node is run on fake tensors."""

    def __init__(self, graph: fx.Graph, mode: FakeTensorMode) -> None:
        self.graph, self.mode = graph, mode
        self.placeholders = graph.find_nodes(op="placeholder")
        self.turn = next((node for node in graph.nodes if _is_backward(node)), graph.output_node())

    def shield(self, changed: dict[int, str]) -> None:
        """Let what reads an old value after it has been overwritten read a copy; `changed` labels placeholders."""
        labels = {storage: label for place, label in changed.items() for storage in storages(self.placeholders[place])}
        for node in self._until_turn():
            late = {user for user in node.users if user.op == "output" or _is_backward(user)}
            held = storages(node) & labels.keys()
            if late and held:
                if not isinstance(node.meta["val"], Tensor) or node_order(node.meta["val"]) is None:
                    label = labels[min(held)]
                    raise CaptureError(f"forward changes {label} while a piece of its old value is needed: clone it")
                copy = self._copy(node, node.meta["val"], self.turn, "forward")
                node.replace_all_uses_with(copy, delete_user_cb=late.__contains__)
        for node in self.graph.nodes:
            if _is_backward(node) and storages(node) & labels.keys():
                node.meta["val"] = fake_result(node, self.mode)

    def own_output(self, node: fx.Node) -> fx.Node:
        """The output, or a copy of it if it is a view of an input or of a constant."""
        given = all_storages([*self.placeholders, *self.graph.find_nodes(op="get_attr")])
        return self._copy(node, node.meta["val"], self.turn, "forward") if storages(node) & given else node

    def write_back(self, changed: Iterable[int], new: Iterable[fx.Node]) -> None:
        """Copy the new values into what the module changed."""
        for place, value in zip(changed, new, strict=True):
            self._add(value, self.turn, "forward", aten.copy_.default, self.placeholders[place], value)

    def own_gradients(self, handed: list[fx.Node], owners: list[fx.Node | None]) -> list[fx.Node]:
        """Copies in the place of gradients that share or don't fill their storage, or lie unlike their owner."""
        taken = all_storages(self._until_turn())
        taken |= all_storages(node for node, owner in zip(handed, owners, strict=True) if owner is None)
        owned = []
        for node, owner in zip(handed, owners, strict=True):
            if owner is not None:
                if storages(node) & taken or not _obeys(node.meta["val"], owner.meta["val"]):
                    before = node.next if _is_backward(node) else self.turn
                    node = self._copy(node, owner.meta["val"], before, "backward")
                taken |= storages(node)
            owned.append(node)
        return owned

    def _until_turn(self) -> list[fx.Node]:
        return list(takewhile(lambda node: node is not self.turn, self.graph.nodes))

    def _copy(self, node: fx.Node, like: Tensor, before: fx.Node, phase: str) -> fx.Node:
        """A copy of a value that is dense, with its dimensions in the order in which they lie in `like`."""
        order = node_order(like) or list(range(like.dim()))
        straight = order == sorted(order)
        if not straight:
            node = self._add(node, before, phase, aten.permute.default, node, order)
        node = self._add(node, before, phase, aten.clone.default, node, memory_format=torch.contiguous_format)
        if not straight:
            node = self._add(node, before, phase, aten.permute.default, node, sorted(order, key=order.index))
        return node

    def _add(
        self, source: fx.Node, before: fx.Node, phase: str, target: OpOverload, *args: Any, **kwargs: Any
    ) -> fx.Node:
        with self.graph.inserting_before(before):
            node = self.graph.call_function(target, args, kwargs)
        node.meta[PROVENANCE] = {"where": source.meta.get(PROVENANCE, {}).get("where", ""), "phase": phase}
        node.meta["val"] = fake_result(node, self.mode)
        return node


def node_order(tensor: Tensor) -> list[int] | None:
    """The dimensions from the outermost to the innermost as they lie in memory; None if there are gaps or overlaps."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    long = [d for d in order if tensor.shape[d] != 1]
    step = 1
    for d in reversed(long):
        if tensor.stride(d) != step and tensor.numel():
            return None
        step *= tensor.shape[d]
    return list(range(tensor.dim())) if long == sorted(long) else order


def _obeys(gradient: Tensor, owner: Tensor) -> bool:
    """Whether a gradient fills its storage, and lies in it as autograd's AccumulateGrad would lay it."""
    whole = gradient.untyped_storage().nbytes() == gradient.numel() * gradient.element_size()
    order = node_order(owner) or list(range(owner.dim()))
    return whole and gradient.permute(order).is_contiguous()


def _is_backward(node: fx.Node) -> bool:
    return node.op == "call_function" and node.meta[PROVENANCE]["phase"] == "backward"
