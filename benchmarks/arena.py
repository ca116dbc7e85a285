"""Measure how much larger a step's block of memory is than what is live in it, for kept steps and captured ones.

    python -m benchmarks.arena [GRAPH ...]      # names of benchmarks/graphs.py, besides the steps of benchmarks/golden

    graph  budget  link  storages  live MB  block MB  lost MB  of the peak  CPU s  torch's  expandable

Budgets are shares of what the plain step allocates, above its inputs. Plans are searched for `--seconds`. The last two
columns are what torch's caching allocator would hold above what is live, by simulation, without and with expandable
segments.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from passes import BudgetError, Forecast, Link, Machine, Trace, make_plan, parse, predict
from passes.simulate.arena import place
from passes.simulate.caching_allocator import held

GOLDEN = Path(__file__).parent / "golden"
SHARES = (1.0, 0.6, 0.4)
LINK = Link(out=22_000.0, back=22_000.0, capacity=1 << 50)
COLUMNS = (
    "graph",
    "budget",
    "link",
    "storages",
    "live MB",
    "block MB",
    "lost MB",
    "of the peak",
    "CPU s",
    "torch's",
    "expandable",
)


def main(graphs: Annotated[list[str] | None, typer.Argument()] = None, seconds: float = 3.0) -> None:
    """Print one table."""
    table = Table(*COLUMNS, box=None)
    steps = {path.stem: parse(path.read_text()) for path in sorted(GOLDEN.glob("*.txt"))}
    for name in graphs or ():
        from benchmarks.graphs import trace_of

        steps[name] = trace_of(name)
    for name, trace in steps.items():
        for share in SHARES:
            for link in (Link(),) if share == 1.0 else (Link(), LINK):
                table.add_row(name, f"{share:.0%}", "yes" if link.out else "", *_cells(trace, share, link, seconds))
    Console(width=140).print(table)


def _cells(trace: Trace, share: float, link: Link, seconds: float) -> list[str]:
    forecast = _planned(trace, share, link, seconds)
    if forecast is None:
        return ["no plan"]
    begin = time.process_time()
    arena = place(forecast)
    took = time.process_time() - begin
    arena.check()
    sizes = [f"{nbytes / 1e6:.1f}" for nbytes in (arena.live, arena.nbytes, arena.lost)]
    simulated = [held(forecast, expandable) for expandable in (False, True)]
    kept = [f"{each.reserved / each.live - 1:+.1%}" for each in simulated]
    return [str(len(arena.slots)), *sizes, f"{arena.lost / forecast.peak:.2%}", f"{took:.1f}", *kept]


def _planned(trace: Trace, share: float, link: Link, seconds: float) -> Forecast | None:
    """Return the forecast of a plan within this share, or of the plain step for all; None if there is no plan."""
    plain = predict(trace, Machine(1 << 60))
    if share == 1.0:
        return plain
    inputs = sum(life.nbytes for life in plain.lifetimes if trace.op[life.producer].is_input)
    try:
        return make_plan(
            trace, Machine(int(inputs + share * (plain.peak - inputs)), link=link), seconds=seconds
        ).forecast
    except BudgetError:
        return None


if __name__ == "__main__":
    typer.run(main)
