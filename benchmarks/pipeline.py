"""GPT2-124M cut into pipeline stages: how even the best cut is, and what finding it takes.

    python -m benchmarks.pipeline [--length 512] [--layers 12] [--share 0]

The step with its loss is captured and priced once. The slowest stage over the mean has a floor, because the product
with the vocabulary is one op. With budgets, each stage is planned with its open forwards under 1F1B; a share of 1 is
what the stage needs without a plan.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import cache, partial

import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table

from memgraph.capture.capture import capture
from memgraph.graph.gradient_sums import gradient_sums
from memgraph.graph.summarize import summarize
from memgraph.profile.op_profiler import OpProfiler
from memgraph.tensors.loss_outputs import select_losses
from passes import BudgetError, Machine, Trace, make_plan
from passes.concurrent_forwards import plan_forwards, unplanned_nbytes
from passes.stages.cut import Cut, Stage, best_cut
from passes.stages.interval_costs import IntervalCosts
from passes.stages.places import Places
from passes.stages.stage_trace import stage_trace

STAGES = (2, 3, 4, 8)
COLUMNS = ("stages", "budget of each", "slowest ms", "slowest / mean", "over bound", "MB of each", "seconds")


def main(length: int = 512, layers: int = 12, chunks: int = 8, share: float = 0.0) -> None:
    """Print a line for each number of stages, without budgets and with."""
    costs = costs_of(layers, length)
    title = f"{len(costs.places.trace.ops)} ops, {len(costs.borders) - 2} places to cut, {chunks} micro-batches, 1F1B"
    table = Table(*COLUMNS, box=None, title=title)
    for count in STAGES:
        forwards = [min(chunks, count - k) for k in range(count)]
        cut, seconds = timed(partial(best_cut, costs, [math.inf] * count, forwards))
        needs = [unplanned_nbytes(trace_of(costs, stage), Machine(1 << 60), stage.forwards) for stage in cut.stages]
        table.add_row(str(count), "-", *figures(cut), megabytes(needs), f"{seconds:.2f}")
        if not share:
            continue
        budget = int(share * max(needs))
        planned = partial(planned_us, costs, budget)
        try:
            tight, seconds = timed(partial(best_cut, costs, [budget] * count, forwards, cache(planned)))
        except BudgetError as error:
            table.add_row(str(count), megabytes([budget]), str(error))
            continue
        table.add_row(str(count), megabytes([budget]), *figures(tight), "", f"{seconds:.2f}")
    Console(width=140).print(table)


def costs_of(layers: int, length: int) -> IntervalCosts:
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=layers))
    ids = torch.randint(0, 50257, (1, length))
    captured = capture(model, (ids,), {"labels": ids}, wanted=select_losses)
    trace = summarize(captured.graph.graph, OpProfiler(1 << 60))
    return IntervalCosts(Places(trace, gradient_sums(captured)))


def trace_of(costs: IntervalCosts, stage: Stage) -> Trace:
    return stage_trace(costs.places, stage.begin, stage.end)


def planned_us(costs: IntervalCosts, budget: int, stage: Stage) -> float:
    """Return the time of a stage under its budget, without offloading; infinite if no plan fits."""
    try:
        result = plan_forwards(trace_of(costs, stage), Machine(budget), stage.forwards, make_plan)
    except BudgetError:
        return math.inf
    return result.forecast.us


def figures(cut: Cut) -> tuple[str, str, str]:
    return f"{cut.slowest_us / 1e3:.1f}", f"{cut.balance:.3f}", f"{cut.slowest_us / cut.bound:.3f}"


def megabytes(nbytes: list[int]) -> str:
    return ", ".join(f"{each / 1e6:.0f}" for each in nbytes)


def timed(work: Callable[[], Cut]) -> tuple[Cut, float]:
    begin = time.process_time()
    return work(), time.process_time() - begin


if __name__ == "__main__":
    typer.run(main)
