"""Measure how far transfers to disk overlap with compute: a section of `benchmarks.state`.

    forecast 9.99 s; alone, compute 3.82 s and the disk 8.45 s   ->   1.18 of the longer

Both are of the plan that is measured. Compute alone is the time of the ops, their recomputation, the start of each
copy, and the updates. The disk alone copies all bytes of the step and its update, out and back; with a link for each
direction, transfer is the longer one.

With `--disk` the disk is limited to so many MB/s, one direction at a time, so that the step waits for it in any case,
and its time depends less on other work of the machine.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.clock import middle
from benchmarks.records import write
from benchmarks.state import Training, compiled, parameters
from memgraph.storage import io_threads
from passes import Forecast, Machine
from passes.ir.ops import FREE, WAIT
from passes.simulate.forecast import update_nbytes

GOAL, GOAL_FORECAST = 1.1, 0.1
LATE = 0.001  # seconds that the limited disk may catch up
COLUMNS = ("update", "budget MB", "forecast s", "compute s", "transfer s", "of the longer", "gap %") + (
    ("step s", "forecast/step", "middle half", "repriced/step")
)  # fmt: skip


@dataclass(frozen=True)
class Alone:
    """Microseconds of compute without copies, and of the copies without compute."""

    compute: float
    transfer: float

    @property
    def longer(self) -> float:
        return max(self.compute, self.transfer)


def overlap(
    per: Annotated[list[float] | None, typer.Option(help="bytes of budget a parameter")] = None,
    steps: int = 9,
    layers: int = 6,
    width: int = 1024,
    disk: Annotated[float, typer.Option(help="MB/s of the disk at most; 0: as it is")] = 0.0,
) -> None:
    """Print the forecast step time, the times of compute and disk alone, and the measured step time."""
    rows = list[Row]()
    held = f", the disk held to {disk:g} MB/s" if disk else ""
    table = Table(*COLUMNS, title=f"{layers} layers of width {width}, Adam{held}; a step and its queues", box=None)
    with held_to(disk):
        for share in per or (2.0, 1.25):
            for fuse in (False, True):
                budget = int(share * parameters(layers, width))
                run = Training(compiled(budget, fuse), layers, width)
                for _ in range(steps):
                    run.step()
                rows.append(row := _row(run, fuse))
                table.add_row(*_cells(row))
    write("state", f"overlap, {layers} layers of width {width}{held}", [asdict(row) for row in rows])
    Console(width=170).print(table)
    print(f"goals: {GOAL} of the longer, forecast within {GOAL_FORECAST:.0%} of the step")


@contextmanager
def held_to(rate: float) -> Iterator[None]:
    """Limit the disk to so many MB/s, one direction at a time; 0 for no limit. These measurements are not cached."""
    if not rate:
        yield
        return
    plain, kept = io_threads.transfer_pages, os.environ.get("MEMGRAPH_CACHE")
    io_threads.transfer_pages, os.environ["MEMGRAPH_CACHE"] = _slowed(plain, rate), ""
    try:
        yield
    finally:
        io_threads.transfer_pages = plain
        del os.environ["MEMGRAPH_CACHE"]
        os.environ |= {} if kept is None else {"MEMGRAPH_CACHE": kept}


def _slowed(transfer: Callable[..., None], rate: float) -> Callable[..., None]:
    lock, free = threading.Lock(), [0.0]

    def slow(call: Callable[..., int], file: int, offset: int, nbytes: int) -> None:
        transfer(call, file, offset, nbytes)
        with lock:
            free[0] = end = max(free[0], time.perf_counter() - LATE) + nbytes / rate / 1e6
        time.sleep(max(0.0, end - time.perf_counter()))

    return slow


@dataclass(frozen=True)
class Row:
    """The results for one budget: forecast microseconds of the step, and measured seconds of each."""

    fused: bool
    budget: int
    forecast_us: float
    alone: Alone
    gap: float
    predicted_us: float
    repriced_us: float | None
    steps: list[float]


def _row(run: Training, fuse: bool) -> Row:
    report = run.report
    forecast, gap = report.choice.forecast, report.choice.gap
    alone = queues(forecast, report.machine)
    return Row(
        fuse, report.budget, forecast.us, alone, gap, report.predicted_us, report.repriced_us, run.settled
    )  # fmt: skip


def _cells(row: Row) -> list[str]:
    step = statistics.median(row.steps)
    low, median, high = middle(row.predicted_us / 1e6 / taken for taken in row.steps)
    return [
        "in backward" if row.fused else "at the end",
        f"{row.budget / 1e6:.1f}",
        *(f"{us / 1e6:.2f}" for us in (row.forecast_us, row.alone.compute, row.alone.transfer)),
        f"{row.forecast_us / row.alone.longer:.2f}",
        *(f"{100 * row.gap:.1f}", f"{step:.2f}", f"{median:.2f}", f"{low:.2f}-{high:.2f}"),
        f"{row.repriced_us / 1e6 / step:.2f}" if row.repriced_us else "",
    ]


def queues(forecast: Forecast, machine: Machine) -> Alone:
    """Return the time of each queue of the step alone."""
    compute, took = 0.0, {"out": 0.0, "back": 0.0}
    trace, ends = forecast.trace, (*forecast.begins[1:], forecast.us)
    for op, begin, end in zip(trace.ops, forecast.begins, ends, strict=True):
        if op.phase == "update":
            for come, go in update_nbytes(trace, op).values():
                took["back"] += come / (machine.link.back or 1.0)
                took["out"] += go / (machine.link.out or 1.0)
            compute += op.us
        elif op.fn not in (FREE, WAIT):
            compute += end - begin
    for copy in forecast.copies:
        took[copy.queue] += copy.end - copy.begin
    return Alone(compute, sum(took.values()) if machine.link.half_duplex else max(took.values()))
