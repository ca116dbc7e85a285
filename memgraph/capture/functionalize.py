"""Trace a graph a second time, so that no op works in place.

    b = empty_like(x); b.bernoulli_(p)       ->   e = empty_like(x); b = bernoulli(e, p)
    running_mean.mul_(0.9)                   ->   m = mul(running_mean, 0.9)   # its new value

The graph runs on torch's functional tensors. The module itself could not: models look at their inputs to find out
whether they are traced, and do not recognise functional tensors.

Keep the parts of a split that are changed in place in one tensor, as eager does.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._functorch._aot_autograd.functional_utils import from_fun, to_fun
from torch._subclasses import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode, disable_functional_mode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils._pytree import tree_map

from ..errors import CaptureError
from ..graph.aten_shims import COPY_WITH_STRIDES
from ..graph.nodes import (
    SPLITS,
    aten,
    fake_result,
    has_same_strides,
    is_check,
    is_random,
    returned_values,
    written_inputs,
)
from ..graph.number_ops import is_number
from ..graph.provenance import PROVENANCE, is_backward
from ..graph.result_layout import layout
from ..graph.tensor_numbers import CopiedNumbers
from ..tensors.traced_size import with_sizes
from .call.call import Call
from .constant_fake_mode import ConstantFakeMode
from .constants import describe_constants, refuse_changed_constants
from .fake_tensors import without_autocast
from .floats.float_inputs import with_stand_ins
from .inplace import replace_inplace
from .joint.joint_graph import JointGraph

Parts = dict[int, fx.Node]  # new values of parts of one split, by number


@dataclass(frozen=True)
class FunctionalGraph:
    """A graph without mutable ops, its results, and the new values of changed inputs by position."""

    graph: fx.GraphModule
    results: tuple[fx.Node, ...]
    changed: dict[int, fx.Node]


def functionalize(joint: JointGraph, call: Call) -> FunctionalGraph:
    """Return the same step without in-place changes."""
    functional = _functional(joint, call.module)
    merge_parts(functional.graph.graph, joint.mode)
    _refuse_shared(call, functional.changed)
    return functional


def _functional(joint: JointGraph, module: nn.Module) -> FunctionalGraph:
    _refuse_scattered_draws(joint.graph.graph, joint.mode)
    if replace_inplace(joint.graph.graph, joint.mode):
        results, assigned = _split_results(joint.graph, len(joint.outputs))
        return FunctionalGraph(joint.graph, results, dict(zip(joint.assigned, assigned, strict=True)))
    refuse_changed_constants(joint.graph, module)
    replay = _Replay(joint)
    values = [node.meta["val"] for node in joint.graph.graph.find_nodes(op="placeholder")]
    with torch.no_grad(), without_autocast(values):  # the graph has the casts already
        graph = make_fx(replay)(*values)
    describe_constants(graph, joint.mode)
    _set_phases(graph, replay.forward)
    results, rest = _split_results(graph, len(joint.outputs))
    assigned, last = rest[: len(joint.assigned)], rest[len(joint.assigned) :]
    placeholders = graph.graph.find_nodes(op="placeholder")
    changed = {i: node for i, node in zip(replay.state, last, strict=True) if node is not placeholders[i]}
    return FunctionalGraph(graph, results, changed | dict(zip(joint.assigned, assigned, strict=True)))


def _refuse_scattered_draws(graph: fx.Graph, mode: ConstantFakeMode) -> None:
    """Raise if an op draws into elements that are not adjacent: those of a new value are, and would be others."""
    for node in filter(is_random, graph.nodes):
        with mode:
            values = [written.meta["val"] for written in written_inputs(node)]
            scattered = [value for value in values if torch.empty_like(value).stride() != value.stride()]
        if scattered:
            raise CaptureError(
                f"{node.meta[PROVENANCE]['where']} draws random numbers in place into elements of a tensor that are "
                "not adjacent, as x[:, ::2].normal_() does: draw them into a tensor of their own, and copy it"
            )


# Of what is results out, by place, what forward has made; and what the inputs hold when it has ended.
GraphEnds = tuple[dict[int, Any], list[Any]]


class _Replay:
    """The function of the second trace: returns the graph's results, and the inputs' values at the end of forward."""

    def __init__(self, joint: JointGraph) -> None:
        self.graph, self.mode = joint.graph, joint.mode
        self.state = [i for i, role in enumerate(joint.inputs) if role.kind != "tangent"]
        gradients = range(sum(role.kind == "output" for role in joint.outputs), len(joint.outputs))
        self.forward_results = [i for i in range(len(joint.outputs) + len(joint.assigned)) if i not in gradients]
        self.forward: frozenset[str] = frozenset()  # names of nodes

    def __call__(self, *values: Tensor) -> list[Any]:
        with FunctionalTensorMode(pre_dispatch=False, _allow_token_discovery=True):
            inputs = [to_fun(value) for value in values]
            run = _Interpreter(self.graph, lambda values: self._end_forward(inputs, values), self.mode)
            results = list(run.run(*inputs))
            ends, last = run.ends or run.at_boundary(results)
            if any(from_fun(inputs[i]) is not value for i, value in zip(self.state, last, strict=True)):
                raise CaptureError(
                    "backward changes a parameter, a buffer or an input in place, which a captured step can't do"
                )
            return [*(ends[i] if i in ends else from_fun(value) for i, value in enumerate(results)), *last]

    def _end_forward(self, inputs: list[Any], results: Sequence[Any]) -> GraphEnds:
        """Record results and inputs. Reading one that is a view may add ops, which belong to forward."""
        ends = {i: from_fun(results[i]) for i in self.forward_results}
        last = [from_fun(inputs[i]) for i in self.state]
        mode = get_proxy_mode()
        assert mode is not None
        self.forward = frozenset(node.name for node in mode.tracer.graph.nodes)
        return ends, last


class _Interpreter(fx.Interpreter):
    """Runs a joint graph, and calls `at_boundary` once, between forward and backward."""

    def __init__(
        self, graph: fx.GraphModule, at_boundary: Callable[[Sequence[Any]], GraphEnds], mode: ConstantFakeMode
    ) -> None:
        super().__init__(graph)
        self.at_boundary, self.mode = at_boundary, mode
        self.ends: GraphEnds | None = None
        self.results = returned_values(graph.graph)
        self.numbers = CopiedNumbers()

    def run_node(self, n: fx.Node) -> Any:
        if self.ends is None and is_backward(n):
            self.ends = self.at_boundary([self.env.get(node) for node in self.results])
        run = self._run_check if is_check(n) else self._copy_number if is_number(n) else super().run_node
        result = run(n)
        if torch.Tag.inplace_view not in getattr(n.target, "tags", ()):
            for written in written_inputs(n):
                _restore_strides(self.env[written], written.meta["val"])
        return result

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
        arguments = super().fetch_args_kwargs_from_env(n)
        if self.mode.shape_env is not None:
            arguments = with_sizes(arguments)
        return with_stand_ins(arguments) if self.mode.has_floats else arguments

    def _run_check(self, n: fx.Node) -> Any:
        """Run below the functional mode, which would wrap the op in one that orders effects."""
        args, kwargs = tree_map(from_fun, self.fetch_args_kwargs_from_env(n))
        with self._set_current_node(n), disable_functional_mode():
            return n.target(*args, **kwargs)  # type: ignore[operator]

    def _copy_number(self, n: fx.Node) -> Any:
        args, _ = tree_map(from_fun, self.fetch_args_kwargs_from_env(n))
        mode = get_proxy_mode()
        assert mode is not None
        with self._set_current_node(n):
            return self.numbers.copy(n, args, mode.tracer)


def _restore_strides(value: Any, like: Tensor) -> None:
    """Give a value that eager changed in place the strides that it has there.

    A view takes the strides of its base. But results of `unsafe_split` are no views here.
    """
    functional: Any = from_fun(value)
    if layout(functional) != layout(like):
        copy = from_fun(torch.ops.memgraph_surrogates.laid(value, like.stride()))
        value.replace_(copy)
        value.commit_update()
        value.sync()


def _set_phases(graph: fx.GraphModule, forward: frozenset[str]) -> None:
    """Set phases by position: for a view that torch computes a second time, the provenance is that of the first one."""
    for node in graph.graph.nodes:
        phase = "forward" if node.name in forward else "backward"
        node.meta[PROVENANCE] = {"where": "", **node.meta.get(PROVENANCE, {}), "phase": phase}


def _split_results(graph: fx.GraphModule, count: int) -> tuple[tuple[fx.Node, ...], tuple[fx.Node, ...]]:
    results = tuple(returned_values(graph.graph))
    return results[:count], results[count:]


def _refuse_shared(call: Call, changed: dict[int, fx.Node]) -> None:
    """Raise if forward changes a tensor that shares memory with another: the graph would not see the change there."""
    storages = [tensor.untyped_storage()._cdata for tensor in call.tensors]
    for i in changed:
        for j, role in enumerate(call.inputs):
            if i != j and storages[i] == storages[j]:
                names = f"{call.inputs[i].label} in place, which shares its memory with {role.label}"
                raise CaptureError(f"forward changes {names}: clone one of them")


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
