"""How much of a step that waits for its disk goes on beside compute: a section of `benchmarks.state`.

    step 9.99 s, compute alone 3.82 s, out 4.40 s, back 4.05 s   ->   2.27 of the busiest queue, 1.18 of the disk

Of the plan that is in force when it is measured: compute alone is what the ops, their re-runs and the begin of each
copy take; a link alone carries all bytes of the step that go its way, the update's among them.  What an update in
windows computes is left out: it has no price, or one with its copies in it.  The disk carries one way at a time: alone
it takes what both links do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.clock import middle
from benchmarks.state import Run, compiled, parameters, train
from passes import Forecast, Machine
from passes.forecast import update_nbytes

GOAL, GOAL_FORECAST = 1.1, 0.1
COLUMNS = ("update", "budget MB", "forecast s", "compute s", "out s", "back s", "of the busiest") + (
    ("of compute or disk", "gap %", "step s", "forecast/step", "middle half", "repriced/step")
)  # fmt: skip


@dataclass(frozen=True)
class Alone:
    """Microseconds that each queue of a step takes without the others."""

    compute: float
    out: float
    back: float

    @property
    def busiest(self) -> float:
        return max(self.compute, self.out, self.back)

    @property
    def one_disk(self) -> float:
        """The same where both links end at one disk."""
        return max(self.compute, self.out + self.back)


def overlap(
    per: Annotated[list[float] | None, typer.Option(help="bytes of budget a parameter")] = None,
    steps: int = 9,
    layers: int = 6,
    width: int = 1024,
) -> None:
    """Print the step as forecast beside what each queue takes alone, and beside the step as measured."""
    table = Table(*COLUMNS, title=f"{layers} layers of width {width}, Adam; a step and its queues", box=None)
    for share in per or (2.0, 1.25):
        for fuse in (False, True):
            budget = int(share * parameters(layers, width))
            table.add_row(*_cells(train(compiled(budget, fuse), layers, width, steps), fuse))
    Console(width=170).print(table)
    print(f"goals: {GOAL} of the busiest queue, forecast within {GOAL_FORECAST:.0%} of the step")


def _cells(run: Run, fuse: bool) -> list[str]:
    report = run.report
    forecast, alone = report.choice.forecast, queues(report.choice.forecast, report.machine)
    low, median, high = middle(forecast.us / 1e6 / taken for taken in run.settled)
    repriced = f"{report.repriced_us / 1e6 / run.step:.2f}" if report.repriced_us else ""
    queued = (forecast.us, alone.compute, alone.out, alone.back)
    return [
        "in backward" if fuse else "at the end",
        f"{report.budget / 1e6:.1f}",
        *(f"{us / 1e6:.2f}" for us in queued),
        *(f"{forecast.us / us:.2f}" for us in (alone.busiest, alone.one_disk)),
        *(f"{100 * report.choice.gap:.1f}", f"{run.step:.2f}", f"{median:.2f}", f"{low:.2f}-{high:.2f}"),
        repriced,
    ]


def queues(forecast: Forecast, machine: Machine) -> Alone:
    """What each queue of the step takes alone."""
    compute, took = 0.0, {"out": 0.0, "back": 0.0}
    trace, ends = forecast.trace, (*forecast.begins[1:], forecast.us)
    for op, begin, end in zip(trace.ops, forecast.begins, ends, strict=True):
        if op.phase == "update":
            come, go = update_nbytes(trace, op)
            took["back"] += come / (machine.back or 1.0)
            took["out"] += go / (machine.out or 1.0)
            compute += op.us if not come + go else 0.0
        elif op.fn not in ("memgraph.free.default", "memgraph.wait.default"):
            compute += end - begin
    for copy in forecast.copies:
        took[copy.queue] += copy.end - copy.begin
    return Alone(compute, **took)
