"""Measure capture and planning of GPT2-124M.

    python -m benchmarks.planning [--layers 12] [--batch 4] [--length 256] [--share 0.5]

The budget is parameters, buffers and batch, and a share of the step's peak above them without a plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table

from memgraph.capture.capture import capture
from memgraph.graph.halves.partition import partition
from memgraph.graph.rewrite import rewrite
from memgraph.graph.summarize import summarize
from memgraph.options.compile_options import CompileOptions
from memgraph.planning.planner import Planner
from memgraph.profile.machine_profile import measure_tiers
from memgraph.profile.op_profiler import OpProfiler
from memgraph.tensors.loss_outputs import select_losses
from passes import Machine, make_plan, predict


def main(layers: int = 12, batch: int = 4, length: int = 256, share: Annotated[float, typer.Option()] = 0.5) -> None:
    """Print the seconds of each phase, and a summary of the plan."""
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=layers))
    ids = torch.randint(0, 50257, (batch, length))
    table = Table("room", "seconds", title=f"torch {torch.__version__}, {torch.get_num_threads()} threads", box=None)

    def timed(room: str, work: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        result = work()
        table.add_row(room, f"{time.perf_counter() - begin:.2f}")
        return result

    captured = timed("capture", lambda: capture(model, (ids,), {"labels": ids}, wanted=select_losses))
    graph = captured.graph.graph
    trace = timed("price (run each distinct op)", lambda: summarize(graph, OpProfiler(1 << 60)))
    plain = predict(trace, Machine(1 << 60))
    there = sum(op.nbytes for op in trace.ops if op.is_input)
    target = Planner(model, CompileOptions(there + int(share * (plain.peak - there)))).target
    machine = Machine(target.budget)
    machine = timed(
        "links (measured once)", lambda: measure_tiers(machine, target.tiers, target.device, target.location)
    )
    choice = timed("plan", lambda: make_plan(trace, machine))
    planned = timed("rewrite", lambda: rewrite(graph, choice.forecast.trace))
    timed("split", lambda: partition(planned, captured.graph))
    console = Console(width=120)
    console.print(table)
    console.print(f"{len(graph.nodes)} nodes; {len(choice.plan)} decisions; {choice.forecast}, as it is {plain}")


if __name__ == "__main__":
    typer.run(main)
