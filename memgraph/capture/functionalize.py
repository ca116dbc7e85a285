"""The second trace: a graph whose ops work in place -> one whose ops only make new values.

    b = empty_like(x); b.bernoulli_(p)       ->   e = empty_like(x); b = bernoulli(e, p)
    running_mean.mul_(0.9)                   ->   m = mul(running_mean, 0.9)   # its new value

The graph is run op by op on torch's functional tensors.  Tracing the module on these straight away would be simpler,
but models look at their inputs to know whether they are traced, and functional tensors are none that they recognise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._functorch._aot_autograd.functional_utils import from_fun, to_fun
from torch._ops import OpOverload
from torch._subclasses.functional_tensor import FunctionalTensorMode, disable_functional_mode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils._pytree import tree_map

from ..errors import CaptureError
from ..graph.nodes import returned_values, written_inputs
from ..graph.provenance import PROVENANCE_KEYS
from ..graph.result_layout import layout
from .constants import describe_constants, refuse_changed_constants
from .float_inputs import with_stand_ins
from .inplace import replace_inplace
from .trace_joint import JointGraph


@dataclass(frozen=True)
class FunctionalGraph:
    """A graph without mutable ops; what it hands out; by place, the new values of the inputs that are changed."""

    graph: fx.GraphModule
    handed: tuple[fx.Node, ...]
    changed: dict[int, fx.Node]


def functionalize(joint: JointGraph, module: nn.Module) -> FunctionalGraph:
    """The same step, in which nothing is changed in place."""
    if replace_inplace(joint.graph.graph, joint.mode):
        handed, assigned = _split(joint.graph, len(joint.outputs))
        return FunctionalGraph(joint.graph, handed, dict(zip(joint.assigned, assigned, strict=True)))
    refuse_changed_constants(joint.graph, module)
    replay = _Replay(joint)
    with torch.no_grad():
        graph = make_fx(replay)(*(node.meta["val"] for node in joint.graph.graph.find_nodes(op="placeholder")))
    describe_constants(graph, joint.mode)
    _note_phases(graph, replay.forward)
    handed, rest = _split(graph, len(joint.outputs))
    assigned, last = rest[: len(joint.assigned)], rest[len(joint.assigned) :]
    placeholders = graph.graph.find_nodes(op="placeholder")
    changed = {i: node for i, node in zip(replay.state, last, strict=True) if node is not placeholders[i]}
    return FunctionalGraph(graph, handed, changed | dict(zip(joint.assigned, assigned, strict=True)))


# Of what is handed out, by place, what forward has made; and what the inputs hold when it has ended.
GraphEnds = tuple[dict[int, Any], list[Any]]


class _Replay:
    """The function of the second trace: what the graph returns, and what its inputs hold when forward has ended."""

    def __init__(self, joint: JointGraph) -> None:
        self.graph, self.has_floats = joint.graph, joint.mode.has_floats
        self.state = [i for i, role in enumerate(joint.inputs) if role.kind != "tangent"]
        gradients = range(sum(role.kind == "output" for role in joint.outputs), len(joint.outputs))
        self.made = [i for i in range(len(joint.outputs) + len(joint.assigned)) if i not in gradients]  # by forward
        self.forward: frozenset[str] = frozenset()  # names of the nodes that forward made

    def __call__(self, *values: Tensor) -> list[Any]:
        with FunctionalTensorMode(pre_dispatch=False, _allow_token_discovery=True):
            inputs = [to_fun(value) for value in values]
            run = _Interpreter(self.graph, lambda values: self._turn(inputs, values), self.has_floats)
            handed = list(run.run(*inputs))
            made, last = run.ends or run.turned(handed)
            if any(from_fun(inputs[i]) is not value for i, value in zip(self.state, last, strict=True)):
                raise CaptureError(
                    "backward changes a parameter, a buffer or an input in place, which a captured step can't do"
                )
            return [*(made[i] if i in made else from_fun(value) for i, value in enumerate(handed)), *last]

    def _turn(self, inputs: list[Any], handed: Sequence[Any]) -> GraphEnds:
        """Forward has ended.  Asking for the value of an input, or of a view that is handed out, may still write ops
        down, which belong to forward."""
        made = {i: from_fun(handed[i]) for i in self.made}
        last = [from_fun(inputs[i]) for i in self.state]
        mode = get_proxy_mode()
        assert mode is not None
        self.forward = frozenset(node.name for node in mode.tracer.graph.nodes)
        return made, last


class _Interpreter(fx.Interpreter):
    """Runs a joint graph, and calls `turned` once, between forward and backward."""

    def __init__(self, graph: fx.GraphModule, turned: Callable[[Sequence[Any]], GraphEnds], has_floats: bool) -> None:
        super().__init__(graph)
        self.turned, self.has_floats = turned, has_floats
        self.ends: GraphEnds | None = None
        self.handed = returned_values(graph.graph)

    def run_node(self, n: fx.Node) -> Any:
        if self.ends is None and n.op == "call_function" and n.meta[PROVENANCE_KEYS]["phase"] == "backward":
            self.ends = self.turned([self.env.get(node) for node in self.handed])
        result = self._checked(n) if _only_checks(n) else super().run_node(n)
        if torch.Tag.inplace_view not in getattr(n.target, "tags", ()):
            for written in written_inputs(n):
                _lay(self.env[written], written.meta["val"])
        return result

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
        arguments = super().fetch_args_kwargs_from_env(n)
        return with_stand_ins(arguments) if self.has_floats else arguments

    def _checked(self, n: fx.Node) -> Any:
        """Run beneath the functional mode, which would wrap the op in one that orders effects."""
        args, kwargs = tree_map(from_fun, self.fetch_args_kwargs_from_env(n))
        with self._set_current_node(n), disable_functional_mode():
            return n.target(*args, **kwargs)  # type: ignore[operator]


def _only_checks(node: fx.Node) -> bool:
    """Whether an op makes and changes nothing, as the one that raises where a matrix has no inverse."""
    if not isinstance(node.target, OpOverload):
        return False
    return not node.target._schema.returns and not node.target._schema.is_mutable


def _lay(value: Any, like: Tensor) -> None:
    """Let a value that was changed in place lie as it does in eager, where the new one lies otherwise.

    A view gets its strides from what it is a view of.  But the pieces of `unsafe_split` are no views here.
    """
    now: Any = from_fun(value)
    if layout(now) != layout(like):
        again = from_fun(torch.ops.memgraph_surrogates.laid(value, like.stride()))
        value.replace_(again)
        value.commit_update()
        value.sync()


def _note_phases(graph: fx.GraphModule, forward: frozenset[str]) -> None:
    """The phase by where a node stands: what torch makes anew for a view bears the notes of the first one."""
    for node in graph.graph.nodes:
        phase = "forward" if node.name in forward else "backward"
        node.meta[PROVENANCE_KEYS] = {"where": "", **node.meta.get(PROVENANCE_KEYS, {}), "phase": phase}


def _split(graph: fx.GraphModule, count: int) -> tuple[tuple[fx.Node, ...], tuple[fx.Node, ...]]:
    handed = tuple(returned_values(graph.graph))
    return handed[:count], handed[count:]
