"""Run torch's `activation_memory_budget` for real: its partition of the step, with eager's kernels.

    AutoAC(model, 0.2)(tokens, targets).backward()

The min-cut partitioner of AOTAutograd decides which values are recomputed, and splits a joint graph into forward and
backward. Nothing is decomposed or fused, so only the decisions differ from memgraph's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch import config
from torch._functorch.partitioners import min_cut_rematerialization_partition

from memgraph.profile.op_profiler import OpProfiler

MANY = 1000  # dynamo gives up on a function that it has compiled more often


class AutoAC:
    """A model under a ratio; `added_us` is the time of its recomputation, by memgraph's prices."""

    def __init__(self, model: nn.Module, ratio: float) -> None:
        self.ratio = ratio
        self.added_us: float | None = None
        backend = aot_autograd(fw_compiler=boxed_nop, bw_compiler=boxed_nop, partition_fn=self._partition)
        # Each ratio has its own backend, because dynamo would otherwise reuse the graph of another one.
        self.compiled = torch.compile(model, backend=backend, dynamic=False)

    def __call__(self, *batch: Tensor) -> Tensor:
        with torch._dynamo.config.patch(recompile_limit=MANY, accumulated_recompile_limit=MANY):
            loss: Tensor = self.compiled(*batch)
        return loss

    def _partition(self, joint: fx.GraphModule, inputs: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        if self.added_us is not None:
            raise RuntimeError(f"torch compiled the model under {self.ratio} twice: the steps are not alike")
        before = _us(joint)
        with config.patch(activation_memory_budget=self.ratio):
            forward, backward = min_cut_rematerialization_partition(joint, inputs, **options)
        self.added_us = _us(forward) + _us(backward) - before
        return forward, backward


def _us(graph: fx.GraphModule) -> float:
    price = OpProfiler(1 << 60)
    return sum(price(node).us for node in graph.graph.nodes if node.op == "call_function")
