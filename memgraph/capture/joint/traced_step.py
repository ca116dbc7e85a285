"""The function of the first trace: forward on traced values, then backward from its outputs.

Find the buffers in whose place forward puts another tensor.

self.running = 0.9 * self.running    ->   {place of running: its new value}, which the graph copies into the buffer
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensor
from torch.autograd.graph import Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.utils import stateless

from ...errors import CaptureError
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
from .results import differentiable, references, refuse_made_leaves, refuse_results


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
        self.mode.traced.append(tracer.tensor_tracker)
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
            refuse_assigned(self.call.module, self.call.state(values), self.inputs, self.assigned)
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
            self.python.running(self.inputs, values),
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
        refuse_results(result)
        # The old value of an assigned buffer is no input that is passed through: the buffer has another value then.
        rewritten = self.grad_edges.rewritten(values)
        passed = {i: value for i, value in enumerate(values) if i not in self.assigned and i not in rewritten}
        given = {id(value): i for i, value in passed.items()}
        everything = self.python.stored(values)
        stored = [leaf for leaf in everything if id(leaf) not in given]
        refuse_made_leaves(stored, leaves, values)
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


def assigned_buffers(
    module: nn.Module, traced: Mapping[str, Tensor], roles: Sequence[Input], shapes: Mapping[str, torch.Size]
) -> dict[int, Tensor]:
    """Return these tensors by the positions of the buffers.

    Args:
        traced: the parameters and buffers that forward was given.
        roles: of these.
        shapes: of the buffers before forward.
    """
    inputs, found = set(map(id, traced.values())), dict[int, Tensor]()
    for place, (path, before) in enumerate(traced.items()):
        owner, _, name = path.rpartition(".")
        assigned = getattr(module.get_submodule(owner), name, None)
        if roles[place].kind == "buffer":
            _refuse_resized(roles[place], before, shapes[path])
        if assigned is not before:
            found[place] = _assignable(roles[place], before, assigned)
    for path, buffer in module.named_buffers(remove_duplicate=False):
        if path not in shapes:
            raise CaptureError(
                f"forward registers the buffer {path}, or gives it its first tensor: register it with one in __init__, "
                "or run the plain module once before it is compiled"
            )
        if path not in traced and isinstance(buffer, FakeTensor) and id(buffer) not in inputs:
            raise CaptureError(f"forward assigns to {path}, a second name of a buffer: change it in place")
    return found


def refuse_assigned(
    module: nn.Module, traced: Mapping[str, Tensor], roles: Sequence[Input], assigned: Mapping[int, Tensor]
) -> None:
    """Raise if a hook, or a function's backward, has put another tensor in the place of a buffer."""
    for place, (path, before) in enumerate(traced.items()):
        owner, _, name = path.rpartition(".")
        if getattr(module.get_submodule(owner), name, None) is not assigned.get(place, before):
            raise CaptureError(
                f"a hook, or a function's backward, assigns to {roles[place].label}, as no captured step can: change "
                "it outside of the module, after backward"
            )


def _refuse_resized(role: Input, buffer: Tensor, before: torch.Size) -> None:
    if buffer.shape != before:
        raise CaptureError(
            f"forward gives {role.label} the shape {tuple(buffer.shape)}, where it was {tuple(before)}, as the "
            "observers of quantization-aware training do in their first call: run the plain module once before it is "
            "compiled, or given to a trainer"
        )


def _assignable(role: Input, before: Tensor, assigned: object) -> Tensor:
    """Return the tensor that was assigned to a buffer, if copying it into the buffer is the same."""
    if role.kind == "parameter" or not isinstance(assigned, Tensor):
        raise CaptureError(
            f"forward, or a wrapper around the module such as FullyShardedDataParallel, puts a "
            f"{type(assigned).__name__} in the place of {role.label}, as no captured step can"
        )
    if (assigned.shape, assigned.dtype, assigned.device) != (before.shape, before.dtype, before.device):
        raise CaptureError(
            f"forward assigns {assigned.dtype} {tuple(assigned.shape)} to {role.label}, which is {before.dtype} "
            f"{tuple(before.shape)}; a captured step can only give it a tensor of its own dtype and shape"
        )
    return assigned
