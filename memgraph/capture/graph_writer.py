"""Insert nodes where forward ends, or after the gradient that they copy.

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
from ..graph.guard_ops import AGREE
from ..graph.nodes import UNGUARDED, all_storages, aten, fake_result, is_guard, storages
from ..graph.number_ops import is_number
from ..graph.provenance import PROVENANCE, is_backward


class GraphWriter:
    """Inserts nodes and runs each on fake tensors. `boundary` is the first node of backward."""

    def __init__(self, graph: fx.Graph, mode: FakeTensorMode) -> None:
        self.graph, self.mode = graph, mode
        self.placeholders = graph.find_nodes(op="placeholder")
        self.boundary = next((node for node in graph.nodes if is_backward(node)), graph.output_node())

    def copy_overwritten_reads(self, changed: dict[int, str]) -> None:
        """Let readers of an old value read a copy if it is overwritten by then; `changed` labels placeholders."""
        labels = {storage: label for place, label in changed.items() for storage in storages(self.placeholders[place])}
        for node in self._forward_nodes():
            late = {user for user in node.users if user.op == "output" or is_backward(user)}
            overwritten = storages(node) & labels.keys()
            if late and overwritten:
                if not isinstance(node.meta["val"], Tensor) or node_order(node.meta["val"]) is None:
                    label = labels[min(overwritten)]
                    raise CaptureError(f"forward changes {label} while part of its old value is still needed: clone it")
                copy = self._copy(node, node.meta["val"], self.boundary, "forward")
                node.replace_all_uses_with(copy, delete_user_cb=late.__contains__)
        for node in self.graph.nodes:
            if is_backward(node) and storages(node) & labels.keys():
                node.meta["val"] = fake_result(node, self.mode)

    def agree_on_guards(self, checking: OpOverload) -> fx.Node | None:
        """Let ranks agree that all guards, and ops `checking`, have held, behind the last of them; return that node, if
        there are any."""
        last = next(
            (node for node in reversed(self._forward_nodes()) if is_guard(node) or node.target is checking), None
        )
        if last is None:
            return None
        read = last.all_input_nodes[0]
        tensor = read.args[0] if is_number(read) else read
        return self._add(last, last.next, "forward", AGREE, tensor, guard=UNGUARDED)

    def copy_if_view_of_input(self, node: fx.Node) -> fx.Node:
        """Return the node, or a copy if it is a view of an input or of a constant."""
        inputs = all_storages([*self.placeholders, *self.graph.find_nodes(op="get_attr")])
        return self._copy(node, node.meta["val"], self.boundary, "forward") if storages(node) & inputs else node

    def write_back(self, changed: Iterable[int], new: Iterable[fx.Node]) -> None:
        """Copy new values into the inputs that the module changed."""
        for place, value in zip(changed, new, strict=True):
            self._add(value, self.boundary, "forward", aten.copy_.default, self.placeholders[place], value)

    def copy_unlike_owner(self, results: list[fx.Node], owners: list[fx.Node | None]) -> list[fx.Node]:
        """Copy gradients that share or don't fill their storage, or have other strides than their owner."""
        taken = all_storages(self._forward_nodes())
        taken |= all_storages(node for node, owner in zip(results, owners, strict=True) if owner is None)
        copied = []
        for node, owner in zip(results, owners, strict=True):
            if owner is not None:
                if storages(node) & taken or not _has_grad_layout(node.meta["val"], owner.meta["val"]):
                    before = node.next if is_backward(node) else self.boundary
                    node = self._copy(node, owner.meta["val"], before, "backward")
                taken |= storages(node)
            copied.append(node)
        return copied

    def _forward_nodes(self) -> list[fx.Node]:
        return list(takewhile(lambda node: node is not self.boundary, self.graph.nodes))

    def _copy(self, node: fx.Node, like: Tensor, before: fx.Node, phase: str) -> fx.Node:
        """Copy a value densely, with the order of dimensions that `like` has in memory."""
        order = node_order(like) or list(range(like.dim()))
        is_permuted = order != sorted(order)
        if is_permuted:
            node = self._add(node, before, phase, aten.permute.default, node, order)
        node = self._add(node, before, phase, aten.clone.default, node, memory_format=torch.contiguous_format)
        if is_permuted:
            back = sorted(range(len(order)), key=order.__getitem__)
            node = self._add(node, before, phase, aten.permute.default, node, back)
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
    """Return the dimensions from outermost to innermost in memory; None if there are gaps or overlaps."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    long = [d for d in order if tensor.shape[d] != 1]
    step = 1
    for d in reversed(long):
        if tensor.stride(d) != step and tensor.numel():
            return None
        step *= tensor.shape[d]
    return list(range(tensor.dim())) if long == sorted(long) else order


def _has_grad_layout(gradient: Tensor, owner: Tensor) -> bool:
    """Return True if a gradient fills its storage, with the strides of autograd's AccumulateGrad."""
    fills_storage = gradient.untyped_storage().nbytes() == gradient.numel() * gradient.element_size()
    order = node_order(owner) or list(range(owner.dim()))
    return fills_storage and gradient.permute(order).is_contiguous()
