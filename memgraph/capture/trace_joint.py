"""Run a call once on fake tensors, forward and backward, and record every op.

    parameters, buffers, inputs, tangents -> forward ops, backward ops -> outputs, gradients, newly assigned buffers

The graph may still have in-place ops, which `functionalize` replaces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    make_fx,
    track_tensor_tree,
)
from torch.nn.utils import stateless

from ..errors import CaptureError
from ..graph.aten_shims import use_surrogates
from ..graph.captured import Input, Output, Ref, View
from ..graph.counters import Counter
from ..graph.nodes import drop_aliases, drop_dead, returned_values
from ..graph.provenance import ProvenanceTracer
from ..graph.tensor_numbers import TensorNumbers, as_tensor
from ..guards.attribute_snapshot import AttributeSnapshot
from ..opaque.recorder import Recorder
from ..opaque.traced_parts import TracedParts, find_sums
from ..tensors.loss_outputs import OutputSelector, reachable_nodes
from ..tensors.pytree import Spec, flatten
from ..tensors.traced_number import ValueNeededError, is_traced
from ..tensors.traced_size import with_arguments
from .call import Call
from .constant_fake_mode import ConstantFakeMode, constant_transformers_checks
from .constants import describe_constants, refuse_trained_constants
from .fake_tensors import make_fake, without_autocast
from .leaf_inputs import InputGradEdges
from .prod_gradient import eager_prod_gradient
from .python_state.counted_numbers import ChangedNumbers, Place, counting, take_back_numbers
from .python_state.draw_in_graph import drawing_in_trace
from .python_state.side_effects import TraceRecord, is_same_step, refuse_side_effects
from .saved.op_log import OpLog
from .sizes.whole_slices import drop_whole_slices
from .user_checkpoint import eager_casts, eager_fast_paths, eager_value_decompositions, without_checkpoint
from .values.host_lengths import readable_lengths
from .values.replay import ReplayValues
from .values.tensor_reads import answering


@dataclass(frozen=True, eq=False)
class JointGraph:
    """The result of the first trace.

    After `outputs`, the graph returns the new values of the placeholders `assigned`. See `Captured` for the rest.
    """

    graph: fx.GraphModule
    mode: ConstantFakeMode
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    assigned: tuple[int, ...]
    leaves: tuple[Any, ...]
    spec: Spec
    differentiable: tuple[int, ...]
    sources: Mapping[Output, frozenset[int]]
    has_custom_functions: bool
    rewritten: Mapping[int, int]
    counters: tuple[Counter, ...]


def trace_joint(
    call: Call, mode: ConstantFakeMode, wanted: OutputSelector, log: OpLog, recorder: Recorder | None = None
) -> JointGraph:
    """Trace a call and, in grad mode, its backward from those differentiable outputs that `wanted` selects.

    Submodules whose calls were recorded are opaque. If the log is a rehearsal, the graph is empty.
    """
    with _as_in_eager(call, mode) as before:
        traced = partial(_traced, call, mode, wanted, before, recorder)
        step, graph = traced(log)
        counted: tuple[Place, ...] = ()
        if step.changed is not None:
            counted = step.changed.places
            step, graph = _counted(traced, step, graph, step.changed)
            log.compare(step.log)
        again = log.again()
        refuse_side_effects(before, _facts(step, graph), lambda: _facts(*traced(again, counted)))
        log.compare(again)
    describe_constants(graph, mode)
    refuse_trained_constants(step.trained, call.module)
    return step.joint_graph(graph)


@contextmanager
def _as_in_eager(call: Call, mode: ConstantFakeMode) -> Iterator[AttributeSnapshot]:
    """Let ops and libraries do what they do in eager, and restore the module afterwards."""
    with (
        AttributeSnapshot(call.module, call.tensors).restored() as before,
        drawing_in_trace(),
        without_checkpoint(),
        eager_fast_paths(),
        eager_prod_gradient(),
        eager_value_decompositions(),
        eager_casts(),
        readable_lengths(),
        constant_transformers_checks(mode),
    ):
        yield before


def _counted(
    traced: Callable[[OpLog, Sequence[Place]], tuple[_TracedStep, fx.GraphModule]],
    step: _TracedStep,
    graph: fx.GraphModule,
    changed: ChangedNumbers,
) -> tuple[_TracedStep, fx.GraphModule]:
    """Trace a forward that counts again, with objects in place of the numbers; raise if it needs the numbers."""
    if step.parts is not None and step.parts.own(path for path, _, _ in changed.places):
        raise changed.error  # they run before the numbers are counted
    try:
        counted, other = traced(step.log.again(), changed.places)
        is_same = is_same_step(_facts(step, graph), _facts(counted, other))
    except Exception as error:
        raise changed.error from error
    if not is_same or counted.has_custom_functions:  # the backward of one may read the number
        raise changed.error
    return counted, other


def _traced(
    call: Call, mode: ConstantFakeMode, wanted: OutputSelector, before: AttributeSnapshot, recorder: Recorder | None,
    log: OpLog, counted: Sequence[Place] = (),
) -> tuple[_TracedStep, fx.GraphModule]:  # fmt: skip
    fakes = [make_fake(tensor, mode, role, mode.sizes) for role, tensor in zip(call.inputs, call.tensors, strict=True)]
    step = _TracedStep(call, mode, wanted, before, log, counted)
    step.parts = TracedParts(recorder) if recorder is not None else None
    with step.provenance.tracking(), mode.tracing():
        graph = make_fx(step)(*fakes)
    if mode.sizes is not None:
        drop_whole_slices(graph.graph, mode)
    use_surrogates(graph.graph)
    drop_aliases(graph.graph, kept=set(returned_values(graph.graph)[: len(step.outputs)]))
    drop_dead(graph.graph)
    if step.numbers.has_escaped():
        raise ValueNeededError("forward stores a number that it reads from a tensor")
    return step, graph


def _facts(step: _TracedStep, graph: fx.GraphModule) -> TraceRecord:
    """Return what must be the same in every call."""
    leaves = [leaf if isinstance(leaf, Ref) else (type(leaf), repr(leaf)) for leaf in step.leaves]
    facts = step.inputs, step.outputs, leaves, step.spec, step.differentiable, list(step.assigned)
    return graph, facts, step.attributes_after


class _TracedStep:
    """The function that is traced."""

    def __init__(
        self, call: Call, mode: ConstantFakeMode, wanted: OutputSelector, before: AttributeSnapshot, log: OpLog,
        counted: Sequence[Place],
    ) -> None:  # fmt: skip
        self.call, self.mode, self.wanted, self.before, self.log = call, mode, wanted, before, log
        self.counted = counted
        self.changed: ChangedNumbers | None = None
        self.counters: list[Counter] = []
        self.provenance = ProvenanceTracer(call.module)
        self.autocast_cache = torch.is_autocast_cache_enabled()
        self.inputs = call.inputs
        self.outputs: tuple[Output, ...] = ()
        self.assigned: dict[int, Tensor] = {}
        self.leaves: tuple[Any, ...] = ()
        self.spec: Spec | None = None
        self.differentiable: tuple[int, ...] = ()
        self.sources: dict[Output, frozenset[int]] = {}
        self.has_custom_functions = False
        self.rewritten: dict[int, int] = {}
        self.numbers = TensorNumbers()
        self.grad_edges = InputGradEdges()
        self.parts: TracedParts | None = None
        self.trained: list[Tensor] = []  # leaves that backward reaches besides the inputs
        self.attributes_after: AttributeSnapshot

    def joint_graph(self, graph: fx.GraphModule) -> JointGraph:
        assert self.spec is not None
        roles = self.inputs, self.outputs, tuple(self.assigned)
        result = self.leaves, self.spec, self.differentiable
        return JointGraph(
            graph,
            self.mode,
            *roles,
            *result,
            self.sources,
            self.has_custom_functions,
            self.rewritten,
            tuple(self.counters),
        )

    def __call__(self, *values: Tensor) -> list[Tensor]:
        with self.log.recording(values, self.provenance.here):
            results = self._run(values)
            facts = self.inputs, self.outputs, tuple(self.assigned), self.differentiable, sorted(self.rewritten.items())
            self.log.end(results, *facts)
        return [] if self.log.is_rehearsal else results

    def _run(self, values: Sequence[Tensor]) -> list[Tensor]:
        proxy_mode = get_proxy_mode()
        assert proxy_mode is not None
        tracer = self.mode.tracer = proxy_mode.tracer
        self.provenance.attach(tracer)
        # make_fx turns it off; a weight that is used twice would be cast twice, and its gradient summed otherwise.
        torch.set_autocast_cache_enabled(self.autocast_cache)
        self.grad_edges = InputGradEdges.of(values, self._results_of_ops())
        self.numbers.tracer = tracer
        numbers = self.numbers if self.mode.has_numbers else None
        with answering(ReplayValues(self.mode.answers, self.mode.value, numbers)) as answers:
            outputs = self._read(self._forward(values), values)
            answers.in_backward = True
            self.outputs = tuple(Output("output", index=i) for i in range(len(outputs)))
            gradients = self._backward(values, outputs, tracer) if torch.is_grad_enabled() else []
        return [*outputs, *gradients, *self.assigned.values()]

    def _results_of_ops(self) -> list[int]:
        """Return the positions of inputs that are no autograd leaves, so that forward may change them."""
        given = zip(self.inputs, self.call.tensors, strict=False) if torch.is_grad_enabled() else ()
        return [i for i, (role, tensor) in enumerate(given) if role.kind == "input" and tensor.grad_fn is not None]

    def _forward(self, values: Sequence[Tensor]) -> Any:
        """Run the module with traced values in place of its parameters and buffers."""
        traced = self.call.state(values)
        names = {path for path, _ in self.call.module.named_buffers(remove_duplicate=False)}
        with stateless._reparametrize_module(self.call.module, traced, tie_weights=True):
            parts = self.parts.replaced() if self.parts is not None else nullcontext()
            with parts, counting(self.counted, self.counters):
                result = self.call.run(values)
            self._find_assigned(traced, names)
        self.changed = take_back_numbers(self.before)
        self.before.refuse_leaks(set(map(id, values)))
        self.attributes_after = AttributeSnapshot(self.call.module, values)
        return result

    def _find_assigned(self, traced: dict[str, Tensor], names: Set[str]) -> None:
        """Record buffers in whose place forward has put another tensor; `names` are the buffers before."""
        module = self.call.module
        inputs = set(map(id, traced.values()))
        for place, (path, before) in enumerate(traced.items()):
            owner, _, name = path.rpartition(".")
            assigned = getattr(module.get_submodule(owner), name, None)
            if assigned is not before:
                self.assigned[place] = _assignable(self.inputs[place], before, assigned)
        for path, buffer in module.named_buffers(remove_duplicate=False):
            if path not in names:
                raise CaptureError(
                    f"forward registers the buffer {path}: register it in __init__, or run the plain module once "
                    "before it is compiled"
                )
            if path not in traced and isinstance(buffer, FakeTensor) and id(buffer) not in inputs:
                raise CaptureError(f"forward assigns to {path}, a second name of a buffer: change it in place")

    def _read(self, result: Any, values: Sequence[Tensor]) -> list[Tensor]:
        """Return the distinct tensors of a result, and keep the rest as `leaves` and `spec`."""
        leaves, self.spec = flatten(with_arguments(result) if self.mode.sizes is not None else result)
        # The old value of an assigned buffer is no input that is passed through: the buffer has another value then.
        rewritten = self.grad_edges.rewritten(values)
        passed = {i: value for i, value in enumerate(values) if i not in self.assigned and i not in rewritten}
        inputs = set(map(id, values))
        differentiable = {leaf.untyped_storage()._cdata for leaf in _differentiated(leaves) if id(leaf) not in inputs}
        outputs: dict[int, Tensor] = {}
        refs: list[Any] = []
        for leaf in leaves:
            if is_traced(leaf) and leaf.node.trace is self.numbers:
                tensor = as_tensor(leaf)
                outputs[id(tensor)] = tensor
                refs.append(Ref("output", len(outputs) - 1, is_number=True))
            elif not isinstance(leaf, Tensor):
                refs.append(leaf)
            elif (ref := self._input_ref(leaf, passed, differentiable)) is not None:
                refs.append(ref)
            else:
                outputs.setdefault(id(leaf), leaf)
                refs.append(Ref("output", list(outputs).index(id(leaf))))
        self.leaves = tuple(refs)
        for i in rewritten:
            outputs.setdefault(id(values[i]), values[i])
            self.rewritten[i] = list(outputs).index(id(values[i]))
        return list(outputs.values())

    def _input_ref(self, leaf: Tensor, passed: Mapping[int, Tensor], differentiable: Set[int]) -> Ref | None:
        """Return a reference if a result is an input, or a view of one that autograd does not know.

        `differentiable` are the storages with a result that autograd differentiates.
        """
        for i, value in passed.items():
            # The gradient of a returned parameter leaves the graph summed with its others, and that of an input with
            # those of its views: in the order in which autograd sums them.
            needs_sum = self.inputs[i].kind == "parameter" or value.untyped_storage()._cdata in differentiable
            if leaf is value and not (needs_sum and value.requires_grad and torch.is_grad_enabled()):
                return Ref("input", i)
        views = ((i, View.of(leaf, value)) for i, value in passed.items())
        return next((Ref("input", i, view) for i, view in views if view is not None), None)

    def _backward(self, values: Sequence[Tensor], outputs: Sequence[Tensor], tracer: Any) -> list[Tensor]:
        """Return the gradients of all inputs that require one, for tangents that become further placeholders."""
        candidates = {i: output for i, output in enumerate(outputs) if output.requires_grad}
        self.differentiable = tuple(candidates)
        nodes = reachable_nodes(output.grad_fn for output in candidates.values())
        self.has_custom_functions = any(isinstance(node, BackwardCFunction) and not _is_ours(node) for node in nodes)
        needed = [i for i, value in enumerate(values) if value.requires_grad]
        roots = self.wanted(candidates) if needed else ()
        if not roots:
            return []
        tangents = [_tangent(outputs[i], i, tracer) for i in roots]
        self.inputs = (*self.inputs, *(Input("tangent", index=i) for i in roots))
        leaves: list[Any] = [self.grad_edges.edges.get(i, values[i]) for i in needed]
        self._begin_backward([outputs[i].grad_fn for i in roots], {*map(id, values), *self.grad_edges.seeds()})
        if self.parts is not None:
            find_sums([outputs[i] for i in roots])
        with without_autocast(values):
            starts = [outputs[i] for i in roots]
            with self.provenance.naming_errors():
                gradients = torch.autograd.grad(starts, leaves, tangents, allow_unused=True)
        grads = {self.inputs[i]: g for i, g in zip(needed, gradients, strict=True) if g is not None}
        self.sources = _sources(
            outputs, roots, dict(zip(map(_gradient_of, (self.inputs[i] for i in needed)), leaves, strict=True))
        )
        for role, gradient in grads.items():
            if gradient.layout != torch.strided:
                raise CaptureError(f"the gradient of {role.label} is {gradient.layout}: use sparse=False")
        self.outputs += tuple(map(_gradient_of, grads))
        return list(grads.values())

    def _begin_backward(self, roots: Sequence[Node | None], inputs: set[int]) -> None:
        """Record the provenance of backward's ops, and which tensors besides the inputs it reaches."""
        nodes = reachable_nodes(roots)
        self.provenance.begin_backward(nodes)
        variables = [getattr(node, "variable", None) for node in nodes]
        self.trained = [variable for variable in variables if variable is not None and id(variable) not in inputs]


def _is_ours(node: BackwardCFunction) -> bool:
    """Return True if capture itself has inserted this function."""
    return str(type(node)._forward_cls.__module__).startswith("memgraph.")  # type: ignore[attr-defined]


def _differentiated(leaves: Sequence[Any]) -> list[Tensor]:
    """Return the tensors that autograd has to differentiate."""
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad and torch.is_grad_enabled()]


def _sources(
    outputs: Sequence[Tensor], roots: Sequence[int], leaves: Mapping[Output, Tensor | GradientEdge]
) -> dict[Output, frozenset[int]]:
    """Map each leaf to the outputs from which backward reaches it."""
    reached = {}
    for i in roots:
        nodes = reachable_nodes([outputs[i].grad_fn])
        reached[i] = {outputs[i], *nodes, *(getattr(node, "variable", None) for node in nodes)}
    ends = {role: leaf.node if isinstance(leaf, GradientEdge) else leaf for role, leaf in leaves.items()}
    return {role: frozenset(i for i in roots if end in reached[i]) or frozenset(roots) for role, end in ends.items()}


def _assignable(role: Input, before: Tensor, assigned: object) -> Tensor:
    """Return the tensor that was assigned to a buffer, if copying it into the buffer is the same."""
    if role.kind == "parameter" or not isinstance(assigned, Tensor):
        raise CaptureError(
            f"forward puts a {type(assigned).__name__} in the place of {role.label}, as no captured step can"
        )
    if (assigned.shape, assigned.dtype, assigned.device) != (before.shape, before.dtype, before.device):
        raise CaptureError(
            f"forward assigns {assigned.dtype} {tuple(assigned.shape)} to {role.label}, which is {before.dtype} "
            f"{tuple(before.shape)}; a captured step can only give it a tensor of its own dtype and shape"
        )
    return assigned


def _gradient_of(role: Input) -> Output:
    return Output("gradient", role.name) if role.kind == "parameter" else Output("input_gradient", index=role.index)


def _tangent(output: Tensor, index: int, tracer: Any) -> Tensor:
    """Insert a placeholder for the gradient of an output: dense, with the output's order of dimensions."""
    with disable_proxy_modes_tracing():
        tangent = torch.empty_like(output.detach())
    last = [node for node in tracer.graph.nodes if node.op == "placeholder"][-1]
    with tracer.graph.inserting_after(last):
        proxy = tracer.create_proxy("placeholder", f"tangent_{index}", (), {})
    track_tensor_tree(tangent, proxy, constant=None, tracer=tracer)
    return tangent
