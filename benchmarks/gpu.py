"""Measure memgraph on a GPU in one run; `make gpu` runs it after the tests.

    python -m benchmarks.gpu [--part NAME ...] [--seconds 420] [--laps 10] [--toy]

Kernels, copies, an update of states in pinned memory, the prices of ops and what an arena gains come first. Then blocks
of GPT2-XL and Llama-8B, in bfloat16: eager, compiled, compiled under `activation_memory_budget`, checkpointed, with
saved tensors on the CPU, and memgraph at the peak of each, once as CUDA graphs. Then a model of 7B parameters, trained
under 16 and 8 GB and by a plain rule. Rows that are skipped for lack of time say so.
benchmarks/results/<device>/<date>.json is written after each row, and a table is printed at the end. `make gpu` has a
process for each part. With --toy it is small enough for a CPU. The exit status is 1 if a row has failed by an error,
else 75 if there was no time for one; the last line names such rows.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import chain
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks import arena_steps, bandwidth, beside, prices, updates, whole
from benchmarks.beside import Figure
from benchmarks.blocks import SHAPES
from benchmarks.contenders import Row, rows
from benchmarks.fake_cuda.described_device import is_described
from benchmarks.laps import Laps, Overtime, within
from benchmarks.records import Run
from benchmarks.stage_log import LEFT

COLUMNS = ("model", "way", "beside", "step ms", "middle half", "peak MB", "reserved MB", "budget MB", "tokens/s", "")
BLOCKS = 0.5  # of the time is for blocks, the rest for the whole model
STEPS = 3  # that are timed
FIGURES = ("kernels", "copies", "updates", "prices", "arena")
LONG = {"arena": 240.0}  # seconds for figures that take longer than PART
PARTS = (*FIGURES, *SHAPES, *whole.SEVEN.parts)
PART = 60.0  # seconds for each of FIGURES
FAILED, LATE = "failed", "no time left"  # units of figures that have no value


def main(
    seconds: float = 420.0, laps: int = 10, toy: bool = False, part: Annotated[list[str] | None, typer.Option()] = None
) -> None:
    """Measure some parts or all, write the file, print the table."""
    if unknown := set(part or ()) - set(PARTS):
        raise typer.BadParameter(f"no part is called {', '.join(sorted(unknown))}; these are: {', '.join(PARTS)}")
    parts = part or PARTS
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu" and not toy:
        raise typer.BadParameter("there is no CUDA device here; --toy shows that the program works")
    if is_described():
        raise typer.BadParameter("a described device has no figures, and these would stand among those of a real one")
    end = time.perf_counter() + seconds
    run = Run(device, "gpu")
    figures: list[Figure] = []
    found: list[Row] = []
    lines: Iterator[Figure | Row] = chain(
        _figures(device, toy, partial(_left, end), parts), _rows(Laps(device), laps, toy, end, parts)
    )
    try:
        for one in lines:
            figures += [one] if isinstance(one, Figure) else []
            found += [one] if isinstance(one, Row) else []
            print(_line(one), file=sys.stderr, flush=True)
            run.write({"figures": [asdict(f) for f in figures], "rows": [asdict(row) for row in found]})
    finally:  # also after Ctrl-C
        console = Console(width=190)
        console.print(table(figures, found))
        console.print(str(run.path))
    if code := status(figures, found):
        raise typer.Exit(code)


def status(figures: Sequence[Figure], found: Sequence[Row]) -> int:
    """Return the exit status, after a line that names what has no result: a stage keeps the last line."""
    failed = [f"{row.model} {row.name}: {row.why}" for row in found if row.has_failed]
    failed += [figure.name for figure in figures if figure.unit == FAILED]
    late = [f"{row.model} {row.name}" for row in found if row.is_late]
    late += [figure.name for figure in figures if figure.unit == LATE]
    if late:
        print(f"no time for {'; '.join(late)}", flush=True)
    if failed:
        print(f"FAILED {'; '.join(failed)}", flush=True)
    return 1 if failed else LEFT if late else 0


def _rows(laps: Laps, count: int, toy: bool, end: float, parts: Sequence[str]) -> Iterator[Row]:
    """Yield all rows of these parts; time that one model does not use goes to the next."""
    begin = time.perf_counter()
    shapes, lines = [name for name in SHAPES if name in parts], [name for name in whole.SEVEN.parts if name in parts]
    for i, name in enumerate(shapes):
        until = begin + (end - begin) * (BLOCKS if lines else 1.0) * (i + 1) / len(shapes)
        yield from rows(name, SHAPES[name].toy() if toy else SHAPES[name], laps, count, partial(_left, until))
    size = whole.SEVEN.toy() if toy else whole.SEVEN
    chosen = [toyed for toyed, name in zip(size.parts, whole.SEVEN.parts, strict=False) if name in parts]
    if chosen:
        yield from _guarded(size.name, whole.rows(size, laps, min(count, STEPS), partial(_left, end), chosen))


def _guarded(name: str, found: Iterator[Row]) -> Iterator[Row]:
    """Yield rows, and after an error a last one with its reason."""
    try:
        yield from found
    except Exception as error:
        yield Row(name, "", why=f"{type(error).__name__}: {error}".partition("\n")[0][:200])


def _left(end: float) -> float:
    return end - time.perf_counter()


def _figures(
    device: torch.device, toy: bool, left: Callable[[], float], parts: Sequence[str] = FIGURES
) -> Iterator[Figure]:
    shapes = {name: shape.toy() if toy else shape for name, shape in SHAPES.items()}
    measured: dict[str, Callable[[], Iterable[Figure]]] = {
        "kernels": lambda: bandwidth.rows(device, 1 << 16, 2) if toy else bandwidth.rows(device),
        "copies": lambda: beside.rows(device),
        "updates": lambda: updates.rows(device),
        "prices": lambda: prices.rows(device, shapes),
        "arena": lambda: arena_steps.rows(device, shapes) if device.type == "cuda" else (),
    }
    for name in (name for name in FIGURES if name in parts):
        found: list[Figure] = []
        own, there = LONG.get(name, PART), left()
        try:
            with within(min(own, there)):
                found.extend(measured[name]())
        except (Exception, Overtime) as error:  # the other figures are measured all the same
            cut = isinstance(error, Overtime) and there < own  # the run's end came before its own
            why = f"{name}: {type(error).__name__}: {error}".partition("\n")[0][:200]
            found += [Figure(why, 0.0, LATE if cut else FAILED)]
        yield from found


def table(figures: list[Figure], found: list[Row]) -> Table:
    shown = Table(*COLUMNS, title=f"torch {torch.__version__}", title_justify="left", box=None)
    for figure in figures:
        shown.add_row("", figure.name, "", *_said(figure))
    for row in found:
        shown.add_row(row.model, row.name, row.beside, *_cells(row), row.why)
    return shown


def _said(figure: Figure) -> list[str]:
    return [f"{figure.value:.1f} {figure.unit}", "" if figure.share is None else f"{figure.share:.1%}"]


def _cells(row: Row) -> list[str]:
    budget = f"{row.budget / 1e6:.1f}" if row.budget else ""
    if row.taken is None:
        return ["", "", "", "", budget, ""]
    low, median, high = row.taken.spread
    sizes = (f"{row.taken.peak / 1e6:.1f}", f"{row.taken.reserved / 1e6:.1f}")
    tokens = f"{row.tokens:.0f}, {row.share:.1%} of the device" if row.tokens else ""
    return [f"{median:.2f}", f"{low:.2f}-{high:.2f}", *sizes, budget, tokens]


def _line(row: Row | Figure) -> str:
    if isinstance(row, Figure):
        return "  ".join([row.name, *_said(row)])
    cells: list[Any] = [row.model, row.name, row.beside, *_cells(row), row.why]
    return "  ".join(cell for cell in cells if cell)


if __name__ == "__main__":
    typer.run(main)
