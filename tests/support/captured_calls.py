"""Capture a call and compare its results with eager's: `agrees(module, *args)` returns the captured step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn

from memgraph.capture.capture import capture, operands
from memgraph.graph.captured import Captured, Output, Ref
from memgraph.graph.nodes import all_storages, is_guard, returned_values, written_inputs
from memgraph.tensors.loss_outputs import select_all
from memgraph.tensors.pytree import flatten, unflatten

X = torch.linspace(-1, 1, 8).view(2, 4)
TOKENS = torch.tensor([[1, 2, 2], [5, 0, 6]])


def agrees(
    module: nn.Module,
    *args: Any,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    wanted: Any = select_all,
    **kwargs: Any,
) -> Captured:
    """Capture a call, run the graph and the module from one seed, and compare the results."""
    torch.manual_seed(1)
    before = torch.get_rng_state()
    with context():
        captured = capture(module, args, kwargs, wanted=wanted)
    assert torch.equal(torch.get_rng_state(), before)

    twin, (twin_args, twin_kwargs) = copy.deepcopy(module), fresh((args, kwargs))
    twins = operands(twin, twin_args, twin_kwargs)
    torch.manual_seed(2)
    with context():
        result = twin(*twin_args, **twin_kwargs)
    outputs = outputs_of(captured, result, twins)
    assert captured.differentiable == tuple(i for i, output in enumerate(outputs) if output.requires_grad)
    tangents = [torch.randn_like(outputs[i]) for i in captured.tangents]
    if tangents:
        torch.autograd.backward([outputs[i] for i in captured.tangents], tangents)

    tensors = operands(module, args, kwargs)
    torch.manual_seed(2)
    with torch.no_grad():
        handed = dict(zip(captured.outputs, captured.graph(*tensors, *tangents), strict=True))
    assert_equal([value for role, value in handed.items() if role.kind == "output"], outputs)
    gradients = {role: value for role, value in handed.items() if role.kind != "output"}
    expected = eager_gradients(captured, twins)
    assert gradients.keys() == expected.keys()
    assert_equal(list(gradients.values()), [expected[role] for role in gradients])
    # The buffers (under any name), parameters and inputs that the module changed.
    assert_equal(tensors, operands(twin, twin_args, twin_kwargs))
    assert_owned(handed, [*tensors, *tangents])
    assert_well_formed(captured.graph.graph)
    return captured


def fresh(tree: Any) -> Any:
    """Return the same tree with tensors that are leaves of autograd; equal entries stay one tensor."""
    leaves, spec = flatten(tree)
    new = {
        id(leaf): leaf.detach().clone().requires_grad_(leaf.requires_grad)
        for leaf in leaves
        if isinstance(leaf, Tensor)
    }
    return unflatten([new.get(id(leaf), leaf) for leaf in leaves], spec)


def outputs_of(captured: Captured, result: Any, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Check what is not a tensor in an eager result; return its tensors in the order of the captured outputs."""
    leaves, spec = flatten(result)
    assert spec.tree == captured.spec.tree
    found: dict[int, Tensor] = {}
    for leaf, ref in zip(leaves, captured.leaves, strict=True):
        if not isinstance(ref, Ref):
            assert leaf == ref
        elif ref.kind == "input":
            assert leaf is tensors[ref.index] or ref.view is not None
            if ref.view is not None:
                assert torch.equal(leaf, ref.view.on(tensors[ref.index])) and not leaf.requires_grad
        else:
            assert found.setdefault(ref.index, leaf) is leaf
    return [found[i] for i in range(len(found))]


def eager_gradients(captured: Captured, tensors: Sequence[Tensor]) -> dict[Output, Tensor]:
    roles = [role for role in captured.inputs if role.kind != "tangent"]
    return {
        Output("gradient", role.name)
        if role.kind == "parameter"
        else Output("input_gradient", index=role.index): tensor.grad
        for role, tensor in zip(roles, tensors, strict=True)
        if tensor.grad is not None
    }


def assert_equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)
        if is_whole(one) and is_whole(other):
            assert all(a == b or n == 1 for a, b, n in zip(one.stride(), other.stride(), one.shape, strict=True))


def is_whole(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() == tensor.nbytes


def assert_owned(handed: Mapping[Output, Tensor], given: Sequence[Tensor]) -> None:
    """Check that a parameter's gradient fills its own storage, and that no output is a view of an input."""
    inputs = {tensor.untyped_storage().data_ptr() for tensor in given}
    assert len(set(map(id, handed.values()))) == len(handed)  # `h` and `h.detach()` are two
    storages = [tensor.untyped_storage().data_ptr() for tensor in [*handed.values(), *given]]
    for role, tensor in handed.items():
        if role.kind == "gradient":
            assert storages.count(tensor.untyped_storage().data_ptr()) == 1, role
            assert is_whole(tensor)
        assert role.kind != "output" or tensor.untyped_storage().data_ptr() not in inputs


def assert_well_formed(graph: fx.Graph) -> None:
    """Check that forward is before backward, which changes only what it makes itself."""
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    forward = [node for node in nodes if node.meta["phase"] == "forward"]
    assert nodes[: len(forward)] == forward
    described = [node for node in graph.nodes if node.op != "output" and not is_guard(node)]
    assert all({"val", "where", "phase"} <= node.meta.keys() for node in described)
    late = {node for node in graph.nodes if node.meta.get("kind") == "tangent"}
    for node in nodes:
        if not late.isdisjoint(node.all_input_nodes):
            late.add(node)
            assert node.meta["phase"] == "backward"
    changing = [node for node in nodes if getattr(getattr(node.target, "_schema", None), "is_mutable", False)]
    of_forward = all_storages([*graph.find_nodes(op="placeholder"), *forward])
    assert all(node in forward or not all_storages(written_inputs(node)) & of_forward for node in changing)
    handed = zip(graph.output_node().meta["kinds"], returned_values(graph), strict=True)
    assert all(node.op != "call_function" or node in forward for kind, node in handed if kind == "output")
    for node in changing:
        assert all(written in node.all_input_nodes[:1] for written in written_inputs(node))


class Plain(nn.Module):
    """A linear layer, and a function of its output."""

    def __init__(self, then: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.ones(4))
        self.register_buffer("last", torch.zeros(4))
        self.then = then

    def forward(self, x: Tensor) -> Any:
        return self.then(self, self.linear(x))
