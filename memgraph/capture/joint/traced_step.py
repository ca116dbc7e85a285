"""The function of the first trace: forward on traced values, then backward from its outputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.graph import Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.utils import stateless

from ...graph.captured import Input, Output, Ref
from ...graph.provenance import ProvenanceTracer
from ...graph.tensor_numbers import TensorNumbers
from ...opaque.traced_parts import TracedParts, find_sums
from ...tensors.loss_outputs import OutputSelector, custom_functions, reachable_nodes
from ...tensors.pytree import Spec, flatten
from ...tensors.traced_number import is_traced
from ...tensors.traced_size import with_arguments
from ..call.call import Call
from ..constant_fake_mode import ConstantFakeMode
from ..constants import own_gradients, own_memory, real_tensors
from ..python_state.watched_python import WatchedPython
from ..values.recurrent_layers import refuse_other_sums
from ..values.replay import ReplayValues
from ..values.tensor_reads import answering
from .assigned_buffers import assigned_buffers
from .gradients import (
    differentiate,
    gradient_role,
    gradient_sources,
    insert_tangent,
    refuse_lost,
    refuse_read_gradients,
    refuse_set_gradients,
    refuse_sparse,
)
from .joint_graph import JointGraph
from .leaf_inputs import InputGradEdges
from .results import differentiable, references, refuse_made_leaves


class TracedStep:
    """The function that is traced."""

    def __init__(self, call: Call, mode: ConstantFakeMode, wanted: OutputSelector, python: WatchedPython) -> None:
        self.call, self.mode, self.wanted, self.python = call, mode, wanted, python
        self.provenance = ProvenanceTracer(call.module)
        self.autocast_cache = torch.is_autocast_cache_enabled()
        self.inputs = call.inputs
        self.values: Sequence[Tensor] = ()
        self.outputs: tuple[Output, ...] = ()
        self.assigned: dict[int, Tensor] = {}
        self.leaves: tuple[Any, ...] = ()
        self.stored: list[tuple[Any, Any]] = []  # what forward puts into attributes, with what stands for it
        self.spec: Spec | None = None
        self.differentiable: tuple[int, ...] = ()
        self.sources: dict[Output, frozenset[int]] = {}
        self.has_custom_functions = False
        self.rewritten: dict[int, int] = {}
        self.numbers = TensorNumbers()
        self.grad_edges = InputGradEdges()
        self.parts: TracedParts | None = None
        self.trained: list[Tensor] = []  # leaves that backward reaches besides the inputs

    def joint_graph(self, graph: fx.GraphModule) -> JointGraph:
        """Return the graph with the roles that the trace has found."""
        assert self.spec is not None
        return JointGraph(
            graph, self.mode, self.inputs, self.outputs, tuple(self.assigned), self.leaves, self.spec,
            self.differentiable, self.sources, self.has_custom_functions, self.rewritten,
        )  # fmt: skip

    def __call__(self, *values: Tensor) -> list[Tensor]:
        self.values = values
        proxy_mode = get_proxy_mode()
        assert proxy_mode is not None
        tracer = self.mode.tracer = proxy_mode.tracer
        self.provenance.attach(tracer)
        # make_fx turns it off; a weight that is used twice would be cast twice, and its gradient summed otherwise.
        torch.set_autocast_cache_enabled(self.autocast_cache)
        self.grad_edges = InputGradEdges.of(values, self._results_of_ops())
        self.numbers.tracer = tracer
        numbers = self.numbers if self.mode.has_numbers else None
        with (
            own_gradients(self.call.module, lambda: real_tensors(tracer)),
            own_memory(self.call.module),
            answering(ReplayValues(self.mode.answers, self.mode.value, numbers)) as answers,
            refuse_read_gradients(self.inputs, values),
            self._running(values),
        ):
            outputs = self._read(self._forward(values), values)
            refuse_set_gradients(self.inputs, values, "forward")
            answers.in_backward = True
            self.outputs = tuple(Output("output", index=i) for i in range(len(outputs)))
            gradients = self._backward(values, outputs, tracer) if torch.is_grad_enabled() else []
            refuse_set_gradients(self.inputs, values, "a function's backward")
            refuse_lost(answers.trained, self.inputs, values, self.outputs)
        self.python.end(values, {id(leaf): ref for leaf, ref in self.stored})
        # No stand-in for a number may outlive the trace.
        self.stored = [(leaf.node.value if is_traced(leaf) else leaf, ref) for leaf, ref in self.stored]
        return [*outputs, *gradients, *self.assigned.values()]

    def _results_of_ops(self) -> list[int]:
        """Return the positions of inputs that are no autograd leaves, so that forward may change them."""
        given = zip(self.inputs, self.call.tensors, strict=False) if torch.is_grad_enabled() else ()
        return [i for i, (role, tensor) in enumerate(given) if role.kind == "input" and tensor.grad_fn is not None]

    @contextmanager
    def _running(self, values: Sequence[Tensor]) -> Iterator[None]:
        """Put traced values in place of the module's tensors: a Function's backward may run it again."""
        self.call.fill_held(values)
        with (
            stateless._reparametrize_module(self.call.module, self.call.state(values), tie_weights=True),
            self.python.running(),
        ):
            yield

    def _forward(self, values: Sequence[Tensor]) -> Any:
        """Run the module, and find what it puts in the place of buffers."""
        shapes = {path: buffer.shape for path, buffer in self.call.module.named_buffers(remove_duplicate=False)}
        with self.parts.replaced() if self.parts is not None else nullcontext():
            result = self.call.run(values)
        self.assigned = assigned_buffers(self.call.module, self.call.state(values), self.inputs, shapes)
        return result

    def _read(self, result: Any, values: Sequence[Tensor]) -> list[Tensor]:
        """Return the distinct tensors of a result and of what forward has stored; the rest is `leaves` and `spec`."""
        leaves, self.spec = flatten(with_arguments(result) if self.mode.sizes is not None else result)
        # The old value of an assigned buffer is no input that is passed through: the buffer has another value then.
        rewritten = self.grad_edges.rewritten(values)
        passed = {i: value for i, value in enumerate(values) if i not in self.assigned and i not in rewritten}
        given = {id(value): i for i, value in passed.items()}
        everything = self.python.stored(values)
        stored = [leaf for leaf in everything if id(leaf) not in given]
        refuse_made_leaves(stored, values)
        refs, outputs = references([*leaves, *stored], self.inputs, passed, values, self.numbers)
        self.leaves = tuple(refs[: len(leaves)])
        self.stored = [*zip(stored, refs[len(leaves) :], strict=True)]
        self.stored += [(leaf, Ref("input", given[id(leaf)])) for leaf in everything if id(leaf) in given]
        for i in rewritten:
            outputs.setdefault(id(values[i]), values[i])
            self.rewritten[i] = list(outputs).index(id(values[i]))
        return list(outputs.values())

    def _backward(self, values: Sequence[Tensor], outputs: Sequence[Tensor], tracer: Any) -> list[Tensor]:
        """Return the gradients of all inputs that require one, for tangents that become further placeholders."""
        candidates = differentiable(outputs)
        self.differentiable = tuple(candidates)
        self.has_custom_functions = bool(custom_functions(output.grad_fn for output in candidates.values()))
        needed = [i for i, value in enumerate(values) if value.requires_grad]
        roots = self.wanted(candidates) if needed else ()
        if not roots:
            return []
        tangents = [insert_tangent(outputs[i], i, tracer) for i in roots]
        self.inputs = (*self.inputs, *(Input("tangent", index=i) for i in roots))
        leaves: list[Any] = [self.grad_edges.edges.get(i, values[i]) for i in needed]
        self._begin_backward([outputs[i].grad_fn for i in roots], {*map(id, values), *self.grad_edges.seeds()})
        if self.parts is not None:
            find_sums([outputs[i] for i in roots])
        refuse_other_sums([outputs[i] for i in roots])
        with self.provenance.naming_errors():
            runs_python = self.has_custom_functions or self.parts is not None
            gradients = differentiate([outputs[i] for i in roots], leaves, tangents, values, runs_python)
        grads = {self.inputs[i]: g for i, g in zip(needed, gradients, strict=True) if g is not None}
        self.sources = gradient_sources(
            outputs, roots, dict(zip(map(gradient_role, (self.inputs[i] for i in needed)), leaves, strict=True))
        )
        refuse_sparse(grads)
        self.outputs += tuple(map(gradient_role, grads))
        return list(grads.values())

    def _begin_backward(self, roots: Sequence[Node | None], inputs: set[int]) -> None:
        """Record the provenance of backward's ops, and which tensors besides the inputs it reaches."""
        nodes = reachable_nodes(roots)
        self.provenance.begin_backward(nodes)
        variables = [getattr(node, "variable", None) for node in nodes]
        self.trained = [variable for variable in variables if variable is not None and id(variable) not in inputs]
