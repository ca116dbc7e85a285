"""Choose for `torch.compile` what it saves for backward: by measured times, and as the best choice there is.

    torch._functorch.config.activation_memory_budget = 0.5
    torch._functorch.config.activation_memory_budget_solver = memgraph.ActivationSolver()
    model = torch.compile(model)

torch gives the values that it may recompute, and the share of their bytes that may be saved.  Its own solvers take the
flops of each op for its time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomKnapsackSolver

from passes.search.knapsack import most_time

from ..graph.nodes import tensors
from ..profile.op_profiler import OpProfiler
from ..system.device import unused_nbytes

VERSION = 1  # of what it chooses: compiled graphs are cached by it


class ActivationSolver(CustomKnapsackSolver):  # type: ignore[misc, unused-ignore]
    """A solver of torch's `activation_memory_budget`; keeps what takes the most time to recompute.

    Each different op runs a few times when a graph is compiled; its time is kept with memgraph's prices. Where sizes
    are symbols, flops stand for times, as in torch.
    """

    def __call__(
        self, memory: list[float], joint_graph: fx.Graph, max_memory: float, node_info: Any,
        all_recomputable_banned_nodes: list[fx.Node],
    ) -> tuple[list[int], list[int]]:  # fmt: skip
        """Return the places of the values to save, and those of the values to recompute.

        Args:
            memory: the size of each value; the unit is torch's own, and that of `max_memory`.
        """
        saved = most_time(memory, _times(all_recomputable_banned_nodes), max_memory)
        rest = set(range(len(memory))) - set(saved)
        return list(saved), sorted(rest)

    def uuid(self) -> str:
        return f"memgraph.ActivationSolver {VERSION}"


def _times(nodes: Sequence[fx.Node]) -> list[float]:
    """Return the microseconds of each op, or its flops if a size is a symbol."""
    values = [value for node in nodes for read in (node, *node.all_input_nodes) for value in tensors(read)]
    if not values or any(isinstance(size, torch.SymInt) for value in values for size in value.shape):
        from torch._functorch.partitioners import estimate_runtime

        return [float(estimate_runtime(node)) for node in nodes]
    profiler = OpProfiler(unused_nbytes(values[0].device) // 2)
    with profiler.together(nodes):
        return [profiler(node).us for node in nodes]
