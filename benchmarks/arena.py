"""Measure how much larger a step's block of memory is than what is live in it, for kept steps and captured ones.

    python -m benchmarks.arena [GRAPH ...]      # names of benchmarks/graphs.py, besides the steps of benchmarks/golden

    graph  budget  link  requests  live MB  arena  held  spacers  missed  CPU s  alone

Budgets are shares of what the plain step allocates, above its inputs. Plans are searched for `--seconds`. `arena`,
`held` and `alone` are above what is live at once: the block, what torch's allocator would hold behind the spacers, and
what it would hold without them, by simulation. Golden steps have `--scale` times their bytes, because requests of up to
1 MiB are not in an arena.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from passes import BudgetError, Forecast, Link, Machine, Trace, make_plan, parse, predict
from passes.simulate.arena import ALIGNMENT, Slot, allocated
from passes.simulate.caching_allocator import SMALL, simulated
from passes.simulate.spacers import Event, guide

GOLDEN = Path(__file__).parent / "golden"
SHARES = (1.0, 0.6, 0.4)
LINK = Link(out=22_000.0, back=22_000.0, capacity=1 << 50)
COLUMNS = ["graph", "budget", "link", "requests", "live_MB", "arena", "held", "spacers", "missed", "CPU_s", "alone"]


def main(graphs: Annotated[list[str] | None, typer.Argument()] = None, seconds: float = 3.0, scale: int = 20) -> None:
    """Print one table."""
    table = Table(*COLUMNS, box=None)
    steps = {path.stem: (parse(path.read_text()), scale) for path in sorted(GOLDEN.glob("*.txt"))}
    for name in graphs or ():
        from benchmarks.graphs import trace_of

        steps[name] = trace_of(name), 1
    for name, (trace, times) in steps.items():
        for share in SHARES:
            for link in (Link(),) if share == 1.0 else (Link(), LINK):
                forecast = _planned(trace, share, link, seconds)
                cells = ["no plan"] if forecast is None else _cells(forecast, times)
                table.add_row(name, f"{share:.0%}", "yes" if link.out else "", *cells)
    Console(width=140).print(table)


def _cells(forecast: Forecast, times: int) -> list[str]:
    slots = [replace(slot, nbytes=times * slot.nbytes) for slot in allocated(forecast, ALIGNMENT)]
    requests = requests_of(slots)
    begin = time.process_time()
    found = guide(requests)
    took = time.process_time() - begin
    large = [slot for slot in slots if slot.nbytes > SMALL]
    held = (found.block, found.reserved, simulated(large).reserved)
    block, guided, alone = (f"{nbytes / found.live - 1:+.2%}" for nbytes in held)
    counts = str(sum(map(len, found.spacers.values()))), str(found.missed)
    return [str(len(large)), f"{found.live / 1e6:.0f}", block, guided, *counts, f"{took:.1f}", alone]


def requests_of(slots: Sequence[Slot]) -> list[Event]:
    """Return the requests of a step: an op asks for what it makes, and then frees what is dead."""
    begun = [(slot.first, 0, number, slot.nbytes) for number, slot in enumerate(slots)]
    ended = [(slot.last, 1, number, 0) for number, slot in enumerate(slots)]
    return [Event(op, number, nbytes) for op, _, number, nbytes in sorted(begun + ended)]


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
