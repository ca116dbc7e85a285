"""Compare the fake values of a captured graph with its kernels' results: `differences(module, *inputs)` is empty."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from memgraph.capture.capture import capture, operands
from memgraph.graph.result_layout import layout


class _Runner(fx.Interpreter):
    """Runs a graph, and records the ops whose results have another type, shape or strides."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.differences: list[str] = []

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(n.target, torch._ops.OpOverload):
            fakes, reals = _tensors(n.meta.get("val")), _tensors(result)
            for place, (fake, real) in enumerate(zip(fakes, reals, strict=False)):
                if real.numel() and fake.dtype != torch.uint8 and layout(fake) != layout(real):
                    self.differences.append(f"{n.target}[{place}]: {layout(fake)} instead of {layout(real)}")
        return result


def differences(module: nn.Module, *inputs: Any) -> list[str]:
    """Return the ops of a captured call, forward and backward, that are described wrongly.

    The workspace of oneDNN's recurrent layers is left out: its bytes are measured.
    """
    captured = capture(module, inputs, {})
    tensors = operands(module, inputs, {})
    values = [node.meta["val"] for node in captured.graph.graph.find_nodes(op="placeholder")]
    tangents = [torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype) for fake in values[len(tensors) :]]
    runner = _Runner(captured.graph)
    with torch.no_grad():
        runner.run(*tensors, *(tangent.normal_() for tangent in tangents))
    return runner.differences


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
