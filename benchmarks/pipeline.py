"""GPT2-124M cut into pipeline stages: how even the best cut is, and what finding it takes.

    python -m benchmarks.pipeline [--length 512] [--layers 12] [--share 0] [--stages 2 --stages 3]

The step with its loss is captured and priced once. The slowest stage over the mean has a floor, because the product
with the vocabulary is one op. With budgets, each stage is planned with its open forwards under 1F1B; a share of 1 is
what the stage needs without a plan. As in a pipeline, the quick passes plan what may be a stage, and those of the best
cut are searched for plans, `--seconds` each.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
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
from memgraph.stages.whole_step import KINDS
from memgraph.tensors.loss_outputs import select_losses
from passes import BudgetError, Machine, Trace, make_plan
from passes.concurrent_forwards import Search, fitting_forwards, unplanned_nbytes, with_plan
from passes.stages.cut import Cut, Stage, best_cut
from passes.stages.interval_costs import IntervalCosts
from passes.stages.makespan import least_makespan
from passes.stages.pipeline_schedule import PipelineSchedule
from passes.stages.places import Places
from passes.stages.preceding import first_gradient_read, recompute_early
from passes.stages.stage_trace import stage_trace
from passes.stages.timeline import StageTimes

STAGES = (2, 3, 4, 8)
COLUMNS = (
    "stages", "budget of each", "slowest ms", "slowest / mean", "over bound", "mini-batch ms", "over bound",
    "MB of each", "seconds",
)  # fmt: skip


def main(
    length: int = 512, layers: int = 12, chunks: int = 8, share: float = 0.0, seconds: float = 60.0,
    stages: list[int] | None = None,
) -> None:  # fmt: skip
    """Print a line for each number of stages, without budgets and with."""
    costs = costs_of(layers, length)
    title = f"{len(costs.places.trace.ops)} ops, {len(costs.borders) - 2} places to cut, {chunks} micro-batches, 1F1B"
    table = Table(*COLUMNS, box=None, title=title)
    for count in stages or STAGES:
        forwards = [min(chunks, count - k) for k in range(count)]
        cut, took = timed(partial(best_cut, costs, [math.inf] * count, forwards))
        needs = [unplanned_nbytes(trace_of(costs, stage), Machine(1 << 60), stage.forwards) for stage in cut.stages]
        ends = mini_batch(costs, cut, [math.inf] * count, chunks, partial(unplanned_times, costs))
        table.add_row(str(count), "-", *figures(cut), *ends, megabytes(needs), f"{took:.2f}")
        if not share:
            continue
        budget = int(share * max(needs))
        planned = partial(planned_us, costs, budget)
        try:
            tight, took = timed(partial(best_cut, costs, [budget] * count, forwards, cache(planned)))
        except BudgetError as error:
            table.add_row(str(count), megabytes([budget]), str(error))
            continue
        searched = partial(planned_times, costs, budget, partial(make_plan, seconds=seconds))
        ends = mini_batch(costs, tight, [budget] * count, chunks, searched)
        table.add_row(str(count), megabytes([budget]), *figures(tight), *ends, "", f"{took:.2f}")
    Console(width=140).print(table)


def costs_of(layers: int, length: int, **sizes: int) -> IntervalCosts:
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=layers, **sizes)
    model = transformers.GPT2LMHeadModel(config)
    ids = torch.randint(0, config.vocab_size, (1, length))
    captured = capture(model, (ids,), {"labels": ids}, wanted=select_losses)
    trace = summarize(captured.graph.graph, OpProfiler(1 << 60))
    return IntervalCosts(Places(trace, gradient_sums(captured)))


def trace_of(costs: IntervalCosts, stage: Stage) -> Trace:
    trace = stage_trace(costs.places, stage.begin, stage.end)
    return replace(trace, outputs=tuple((KINDS.get(kind, kind), value) for kind, value in trace.outputs))


def planned_us(costs: IntervalCosts, budget: int, stage: Stage) -> float:
    """Return the time of a stage under its budget, without offloading; infinite if no plan fits."""
    with suppress(BudgetError):
        return planned_times(costs, budget, None, stage).busy
    return math.inf


def planned_times(costs: IntervalCosts, budget: int, search: Search | None, stage: Stage) -> StageTimes:
    """Return the times of a stage, whose recomputations run before the gradient comes where there is room.

    Raises:
        BudgetError: no plan fits.
    """
    trace, machine = trace_of(costs, stage), Machine(budget)
    choice = fitting_forwards(trace, machine, stage.forwards, search)
    if choice is None:
        raise BudgetError(f"no plan fits stage {stage.number}", budget, budget)
    if stage.end != costs.borders[-1]:
        choice = recompute_early(choice, budget, partial(with_plan, choice.captured.trace, machine, stage.forwards))
    planned = choice.forecast.trace
    read = first_gradient_read(planned) if stage.end != costs.borders[-1] else None
    before = [op.name for op in planned.ops].index(read) if read is not None else planned.boundary
    us = [op.us for op in planned.ops]
    return StageTimes(
        sum(us[: planned.boundary]), sum(us[planned.boundary :]), recompute=sum(us[planned.boundary : before])
    )


def unplanned_times(costs: IntervalCosts, stage: Stage) -> StageTimes:
    i, j = costs.borders.index(stage.begin), costs.borders.index(stage.end)
    return StageTimes(float(costs.forward_us[i, j]), float(costs.backward_us[i, j]))


def mini_batch(
    costs: IntervalCosts, cut: Cut, budgets: list[float], chunks: int, times: Callable[[Stage], StageTimes]
) -> tuple[str, str]:
    """Return the time of a mini-batch under 1F1B, and its ratio to the bound of any cut and any plans."""
    schedule = PipelineSchedule("1f1b", len(budgets), chunks)
    us = schedule.timeline([times(stage) for stage in cut.stages]).us
    least = least_makespan(costs, budgets, [stage.forwards for stage in cut.stages], chunks)
    return f"{us / 1e3:.1f}", f"{us / least:.3f}"


def figures(cut: Cut) -> tuple[str, str, str]:
    return f"{cut.slowest_us / 1e3:.1f}", f"{cut.balance:.3f}", f"{cut.slowest_us / cut.bound:.3f}"


def megabytes(nbytes: list[int]) -> str:
    return ", ".join(f"{each / 1e6:.0f}" for each in nbytes)


def timed(work: Callable[[], Cut]) -> tuple[Cut, float]:
    begin = time.process_time()
    return work(), time.process_time() - begin


if __name__ == "__main__":
    typer.run(main)
