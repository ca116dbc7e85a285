"""Cut a deep GPT2 into 64 and 512 stages, and simulate 1,000 micro-batches.

    python -m benchmarks.pipeline_simulated [--layers 48] [--chunks 1000]

The step of one micro-batch is captured and priced once.  For each number of stages: the seconds that cut, order and
simulation take, the time of a mini-batch over a proven bound, the share of it in which ranks wait, and the bytes of the
largest stage with all its open forwards.  With recomputation a stage makes all that its backward reads once more: when
the gradient has come, or before.  Nothing runs in stages here; all times are forecasts.
"""

from __future__ import annotations

import math
import time

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.pipeline import costs_of
from benchmarks.records import write
from passes.stages.cut import best_cut
from passes.stages.interval_costs import IntervalCosts
from passes.stages.makespan import least_makespan
from passes.stages.pipeline_schedule import PipelineSchedule
from passes.stages.timeline import StageTimes

STAGES = (64, 512)
Value = int | str | float | None
SMALL = {"n_embd": 64, "n_head": 4, "vocab_size": 1024}
COLUMNS = ("stages", "recomputes", "seconds", "mini-batch ms", "over bound", "waiting", "hidden ms", "MB of a stage")


def main(layers: int = 48, chunks: int = 1000) -> None:
    """Print a line for each number of stages, and each way to recompute."""
    costs = costs_of(layers, 64, **SMALL)
    title = f"GPT2 of {layers} layers: {len(costs.places.trace.ops)} ops, {len(costs.borders) - 2} places to cut"
    table, rows = Table(*COLUMNS, box=None, title=f"{title}, {chunks} micro-batches, 1F1B"), []
    for count in STAGES:
        for recomputes in ("nothing", "late", "early"):
            row = simulated(costs, count, chunks, recomputes)
            table.add_row(*map(shown, row))
            rows.append(dict(zip(COLUMNS, row, strict=True)))
    Console(width=140).print(table)
    write("pipeline", "simulated", rows)


def simulated(costs: IntervalCosts, count: int, chunks: int, recomputes: str) -> tuple[Value, ...]:
    begin = time.perf_counter()
    fresh = IntervalCosts(costs.places)
    schedule = PipelineSchedule("1f1b", count, chunks)
    forwards = [schedule.open_forwards(stage) for stage in range(count)]
    cut = best_cut(fresh, [math.inf] * count, forwards)
    at = [fresh.borders.index(stage.begin) for stage in cut.stages]
    ends = [*at[1:], len(fresh.borders) - 1]
    times = [stage_times(fresh, i, j, recomputes) for i, j in zip(at, ends, strict=True)]
    timeline = schedule.timeline(times)
    seconds = time.perf_counter() - begin
    held = [
        fresh.resident[i, j] + n * fresh.saved[i, j] * (recomputes == "nothing")
        for i, j, n in zip(at, ends, forwards, strict=True)
    ]
    over = None
    if (count, recomputes) == (STAGES[0], "nothing"):  # the bound of more stages takes its time
        over = timeline.us / least_makespan(fresh, [math.inf] * count, forwards, chunks)
    hidden = sum(timeline.hidden) / 1e3
    return count, recomputes, seconds, timeline.us / 1e3, over, timeline.bubble, hidden, float(max(held)) / 1e6


def shown(value: Value) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def stage_times(costs: IntervalCosts, i: int, j: int, recomputes: str) -> StageTimes:
    forward, backward = float(costs.forward_us[i, j]), float(costs.backward_us[i, j])
    if recomputes == "nothing":
        return StageTimes(forward, backward)
    return StageTimes(forward, backward + forward, recompute=forward if recomputes == "early" else 0.0)


if __name__ == "__main__":
    typer.run(main)
