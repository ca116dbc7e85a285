"""A functional joint graph -> the graph that is planned and run.

    forward, backward                    ->  forward, copy_(buffer, its new value), backward
    outputs, gradients, new values       ->  outputs, gradients

What the module changes is written back at the end of forward.  An output is never a piece of an input.  The gradient of a parameter is the
only value that holds its storage, and has the strides that autograd would give it.  What nobody reads is dropped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses import FakeTensorMode

from .call import Input
from .errors import CaptureError
from .functional import Functional
from .joint import Joint
from .nodes import derived, drop_aliases, drop_dead, gather_constants, storages
from .where import NOTES

aten = torch.ops.aten


def settle(found: Functional, joint: Joint) -> fx.GraphModule:
    """The graph whose placeholders are `joint.inputs` and which returns `joint.outputs`."""
    graph = found.graph.graph
    output = graph.output_node()
    output.args = ((*found.handed, *found.changed.values()),)
    kinds = [role.kind for role in joint.outputs]
    drop_aliases(graph, {node for node, role in zip(found.handed, joint.outputs, strict=True) if role.kind == "output"})
    gather_constants(graph)
    desk = _Desk(graph, joint.mode)
    desk.shield({place: joint.inputs[place].name for place in found.changed})
    handed = list(output.args[0])  # type: ignore[arg-type]
    handed, new = handed[: len(kinds)], handed[len(kinds) :]
    handed = desk.own_outputs(handed, kinds)
    desk.write_back(found.changed, new)
    owners = {role.name: desk.placeholders[i] for i, role in enumerate(joint.inputs)}
    handed = desk.own_gradients(
        handed, [owners[role.name] if role.kind == "gradient" else None for role in joint.outputs]
    )
    output.args = (tuple(handed),)
    output.meta["kinds"] = tuple("output" if kind == "output" else "gradient" for kind in kinds)
    drop_dead(graph)
    _label(graph, joint.inputs)
    graph.lint()
    found.graph.recompile()
    return found.graph


class _Desk:
    """A graph under the pen.  `turn` is where backward begins; each new node is run on fake tensors."""

    def __init__(self, graph: fx.Graph, mode: FakeTensorMode) -> None:
        self.graph, self.mode = graph, mode
        self.placeholders = graph.find_nodes(op="placeholder")
        self.turn = next((node for node in graph.nodes if _is_backward(node)), graph.output_node())

    def shield(self, changed: dict[int, str]) -> None:
        """Let what reads an old value after it has been overwritten read a copy."""
        overwritten = {
            storage: name for place, name in changed.items() for storage in storages(self.placeholders[place])
        }
        for node in self._until_turn() if overwritten else ():
            late = {user for user in node.users if user.op == "output" or _is_backward(user)}
            held = storages(node) & overwritten.keys()
            if not late or not held:
                continue
            if not isinstance(node.meta["val"], Tensor) or order_of(node.meta["val"]) is None:
                names = ", ".join(sorted(overwritten[storage] for storage in held))
                raise CaptureError(
                    f"forward changes {names} while a piece of its old value is still needed: clone it first"
                )
            copy = self._copy(node, node.meta["val"], self.turn, "forward")
            node.replace_all_uses_with(copy, delete_user_cb=late.__contains__)
        for node in self.graph.nodes:
            if _is_backward(node) and storages(node) & overwritten.keys():
                node.meta["val"] = derived(node, self.mode)

    def own_outputs(self, handed: list[fx.Node], kinds: list[str]) -> list[fx.Node]:
        """Copy what is a view of an input or of a constant."""
        given = _all_storages([*self.placeholders, *self.graph.find_nodes(op="get_attr")])
        owned = []
        for node, kind in zip(handed, kinds, strict=True):
            shared = kind == "output" and storages(node) & given
            owned.append(self._copy(node, node.meta["val"], self.turn, "forward") if shared else node)
        return owned

    def write_back(self, changed: Iterable[int], new: Iterable[fx.Node]) -> None:
        """Copy the new values into what the module changed."""
        for place, value in zip(changed, new, strict=True):
            self._add(value, self.turn, "forward", aten.copy_.default, self.placeholders[place], value)

    def own_gradients(self, handed: list[fx.Node], owners: list[fx.Node | None]) -> list[fx.Node]:
        """Copy the gradients that share their storage, don't fill it, or have other strides than autograd would give them."""
        taken = _all_storages(self._until_turn())
        taken |= _all_storages(node for node, owner in zip(handed, owners, strict=True) if owner is None)
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
        order = order_of(like) or list(range(like.dim()))
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
        node.meta[NOTES] = {"where": source.meta.get(NOTES, {}).get("where", ""), "phase": phase}
        node.meta["val"] = derived(node, self.mode)
        return node


def order_of(tensor: Tensor) -> list[int] | None:
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
    order = order_of(owner) or list(range(owner.dim()))
    return whole and gradient.permute(order).is_contiguous()


def _all_storages(nodes: Iterable[fx.Node]) -> set[int]:
    return {storage for node in nodes for storage in storages(node)}


def _is_backward(node: fx.Node) -> bool:
    return node.op == "call_function" and node.meta[NOTES]["phase"] == "backward"


def _label(graph: fx.Graph, inputs: Iterable[Input]) -> None:
    """Readable names for the placeholders, and on every node only what the rest of memgraph reads."""
    for node, role in zip(graph.find_nodes(op="placeholder"), inputs, strict=True):
        name = role.name or f"{role.kind}_{role.index}"
        node._rename(re.sub(r"\W", "_", name))
        node.target = node.name
        node.meta = {"kind": role.kind, "val": node.meta["val"], NOTES: {"phase": "forward", "where": name}}
    for node in graph.nodes:
        if node.op != "output":
            notes = node.meta.get(NOTES, {"phase": "forward", "where": ""})
            kept = {key: node.meta[key] for key in ("val", "kind") if key in node.meta}
            node.meta = kept | {"phase": notes["phase"], "where": notes["where"]}
