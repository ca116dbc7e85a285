"""Gradients in a trace: the tangents with which backward begins, their roles, and the outputs that they come from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, track_tensor_tree

from ...errors import CaptureError
from ...graph.captured import Input, Output
from ...tensors.loss_outputs import reachable_nodes
from ..fake_tensors import without_autocast


def insert_tangent(output: Tensor, index: int, tracer: Any) -> Tensor:
    """Insert a placeholder for the gradient of an output: dense, with the output's order of dimensions."""
    with disable_proxy_modes_tracing():
        tangent = torch.empty_like(output.detach())
    with tracer.graph.inserting_after(tracer.graph.find_nodes(op="placeholder")[-1]):
        proxy = tracer.create_proxy("placeholder", f"tangent_{index}", (), {})
    track_tensor_tree(tangent, proxy, constant=None, tracer=tracer)
    return tangent


def gradient_role(role: Input) -> Output:
    """Return the role of the gradient of an input."""
    return Output("gradient", role.name) if role.kind == "parameter" else Output("input_gradient", index=role.index)


def differentiate(
    roots: Sequence[Tensor], leaves: Sequence[Any], tangents: Sequence[Tensor], values: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the leaves for these tangents of the roots; `values` are the inputs of the step."""
    with without_autocast(values):
        return torch.autograd.grad(roots, leaves, tangents, allow_unused=True)


def refuse_sparse(gradients: Mapping[Input, Tensor]) -> None:
    """Raise if a gradient is not dense."""
    for role, gradient in gradients.items():
        if gradient.layout != torch.strided:
            raise CaptureError(f"the gradient of {role.label} is {gradient.layout}: use sparse=False")


def gradient_sources(
    outputs: Sequence[Tensor], roots: Sequence[int], leaves: Mapping[Output, Tensor | GradientEdge]
) -> dict[Output, frozenset[int]]:
    """Map each leaf to the outputs from which backward reaches it."""
    if len(roots) == 1:
        return dict.fromkeys(leaves, frozenset(roots))
    reached = {}
    for i in roots:
        nodes = reachable_nodes([outputs[i].grad_fn])
        reached[i] = {outputs[i], *nodes, *(getattr(node, "variable", None) for node in nodes)}
    ends = {role: leaf.node if isinstance(leaf, GradientEdge) else leaf for role, leaf in leaves.items()}
    return {role: frozenset(i for i in roots if end in reached[i]) or frozenset(roots) for role, end in ends.items()}


def has_custom_functions(nodes: Iterable[Node]) -> bool:
    """Return True if autograd nodes are functions of the user's, whose backward is Python."""
    return any(isinstance(node, BackwardCFunction) and not _is_ours(node) for node in nodes)


def _is_ours(node: BackwardCFunction) -> bool:
    """Return True if capture itself has inserted this function."""
    return str(type(node)._forward_cls.__module__).startswith("memgraph.")  # type: ignore[attr-defined]
