"""Trace a graph a second time, so that no op works in place.

    b = empty_like(x); b.bernoulli_(p)       ->   e = empty_like(x); b = bernoulli(e, p)
    running_mean.mul_(0.9)                   ->   m = mul(running_mean, 0.9)   # its new value

The graph runs on torch's functional tensors. The module itself could not: models look at their inputs to find out
whether they are traced, and do not recognise functional tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._functorch._aot_autograd.functional_utils import from_fun, to_fun
from torch._subclasses.functional_tensor import FunctionalTensorMode, disable_functional_mode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils._pytree import tree_map

from ..errors import CaptureError
from ..graph.nodes import is_check, is_random, returned_values, written_inputs
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
from .split_parts import merge_parts


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
