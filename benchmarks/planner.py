"""Benchmark the planner: its gap, its bounds, its time, and its plans in real steps beside rivals.

    python -m benchmarks.planner simulated [GRAPH ...] [--folder DIR]   # large traces, priced by a roofline
    python -m benchmarks.planner real [PART ...] [--rounds 9]           # parts: rivals, forecast
    python -m benchmarks.planner depth [--rounds 3] [--folder DIR]      # plan time against depth
    python -m benchmarks.planner all

`rivals` is torch's activation_memory_budget at equal measured peak; `forecast` is predicted over measured step time.
Goals that are missed are printed as such; the exit status is 0.  Figures go to benchmarks/results/ as well.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks import depth, records, simulated

app = typer.Typer(add_completion=False, help=__doc__)
console = Console(width=150)
PARTS = ("rivals", "forecast")
Rounds = Annotated[int, typer.Option(min=3, help="How often each step is timed, in turn with the others.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Of torch; one is steadier where the cores are shared.")]
Folder = Annotated[Path | None, typer.Option(help="Where traces are kept from run to run.")]


@app.command("simulated")
def simulate(names: Annotated[list[str] | None, typer.Argument()] = None, folder: Folder = None) -> None:
    """Print overhead, bound, gap, plan time and memory on large traces."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    rows = simulated.simulated(names, folder)
    console.print(simulated.table(rows))
    console.print("\n".join(simulated.verdict(rows)))
    kept = [asdict(row) | {"missed": row.missed} for row in rows]
    console.print(f"in {records.write('planner', 'simulated', kept)}")


@app.command("depth")
def against_depth(rounds: Annotated[int, typer.Option(min=1)] = 3, folder: Folder = None) -> None:
    """Print plan time for steps of 6 to 96 equal layers, by parts of the planner."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    rows = depth.depths(rounds, folder)
    console.print(depth.table(rows))
    console.print(f"in {records.write('depth', 'gpt', [asdict(row) for row in rows])}")


@app.command()
def real(
    parts: Annotated[list[str] | None, typer.Argument()] = None, rounds: Rounds = 9, threads: Threads = None
) -> None:
    """Run steps on this CPU beside torch's own ways to save memory."""
    import torch  # here, because only this part needs it

    from benchmarks import forecast, rivals

    torch.set_num_threads(threads or torch.get_num_threads())
    console.print(f"{torch.get_num_threads()} threads, load {records.surroundings()['load']}")
    for part in parts or PARTS:
        if part not in PARTS:
            raise typer.BadParameter(f"{part} is not one of {', '.join(PARTS)}")
        if part == "forecast":
            ratios = forecast.forecast(rounds)
            console.print(forecast.table(ratios), width=200)
            records.write("planner", part, [asdict(ratio) for ratio in ratios])
            continue
        rows = rivals.rivals(rounds)
        console.print(rivals.table(rows))
        console.print("\n".join(rivals.verdict(rows)))
        records.write("planner", part, [asdict(row) for row in rows])


@app.command("all")
def everything(rounds: Rounds = 9, folder: Folder = None, threads: Threads = None) -> None:
    """Run all of the benchmark."""
    simulate(None, folder)
    against_depth(folder=folder)
    real(None, rounds, threads)


if __name__ == "__main__":
    app()
