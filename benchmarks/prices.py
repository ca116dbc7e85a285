"""Compare what the ops of a step cost one by one with what the step takes.

    rows(cuda, SHAPES)  ->  Figure("prices of the ops of gpt2-xl", 29.5, "ms", 0.98), ...

A forecast is a sum of such prices, so shares of eager's step should be near 1. The step runs op by op, on one stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median

import torch

from benchmarks.beside import Figure
from benchmarks.blocks import Shape, stack
from benchmarks.clock import step_of
from benchmarks.laps import Laps
from memgraph.capture.capture import capture
from memgraph.graph.summarize import summarize
from memgraph.profile.op_profiler import OpProfiler
from memgraph.system.device import unused_nbytes
from memgraph.tensors.loss_outputs import select_losses

LAPS = 10


def rows(device: torch.device, shapes: Mapping[str, Shape], laps: int = LAPS) -> Iterator[Figure]:
    """Price and measure forward and backward of each stack of blocks."""
    for name, shape in shapes.items():
        Laps(device).clear()
        model, x = stack(shape, device)
        step = step_of(model, lambda: model(x))  # noqa: B023 - called in this round only
        step()
        measured = median(Laps(device).ms(step) for _ in range(laps))
        model.zero_grad(set_to_none=True)
        graph = capture(model, (x,), {}, wanted=select_losses).graph.graph
        priced = sum(op.us for op in summarize(graph, OpProfiler(unused_nbytes(device) // 2)).ops) / 1e3
        yield Figure(f"prices of the ops of {name}", priced, "ms", priced / measured)
