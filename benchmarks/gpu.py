"""Measure memgraph on a GPU in one run; `make gpu` runs it after the tests.

    python -m benchmarks.gpu [--seconds 420] [--laps 10] [--toy]

Kernels, copies and an update of states in pinned memory come first, then blocks of GPT2-XL and Llama-8B, in bfloat16:
eager, compiled, compiled under `activation_memory_budget`, checkpointed, with saved tensors on the CPU, and memgraph at
the peak of each, once as CUDA graphs; then a model of 7B parameters, trained under 16 and 8 GB and by a plain
rule. Rows that are skipped for lack of time say so. benchmarks/results/<device>/<date>.json is written after each row,
and a table is printed at the end. With --toy it is small enough for a CPU. Not yet run on a GPU.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import partial
from itertools import chain
from typing import Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks import bandwidth, beside, updates, whole
from benchmarks.beside import Figure
from benchmarks.blocks import SHAPES
from benchmarks.contenders import Row, rows
from benchmarks.laps import Laps, Overtime, within
from benchmarks.records import Run

COLUMNS = ("model", "way", "beside", "step ms", "middle half", "peak MB", "reserved MB", "budget MB", "tokens/s", "")
BLOCKS = 0.5  # of the time is for blocks, the rest for the whole model
STEPS = 3  # that are timed
PART = 60.0  # seconds for the figures of kernels, of copies, and of updates


def main(seconds: float = 420.0, laps: int = 10, toy: bool = False) -> None:
    """Measure, write the file, print the table."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu" and not toy:
        raise typer.BadParameter("there is no CUDA device here; --toy shows that the program works")
    end = time.perf_counter() + seconds
    run = Run(device, "gpu")
    figures: list[Figure] = []
    found: list[Row] = []
    lines: Iterator[Figure | Row] = chain(
        _figures(device, toy, partial(_left, end)), _rows(Laps(device), laps, toy, end)
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


def _rows(laps: Laps, count: int, toy: bool, end: float) -> Iterator[Row]:
    """Yield all rows; time that one model does not use goes to the next."""
    begin = time.perf_counter()
    for i, (name, shape) in enumerate(SHAPES.items()):
        until = begin + (end - begin) * BLOCKS * (i + 1) / len(SHAPES)
        yield from rows(name, shape.toy() if toy else shape, laps, count, partial(_left, until))
    size = whole.SEVEN.toy() if toy else whole.SEVEN
    yield from _guarded(size.name, whole.rows(size, laps, min(count, STEPS), partial(_left, end)))


def _guarded(name: str, found: Iterator[Row]) -> Iterator[Row]:
    """Yield rows, and after an error a last one with its reason."""
    try:
        yield from found
    except Exception as error:
        yield Row(name, "", why=f"{type(error).__name__}: {error}".partition("\n")[0][:200])


def _left(end: float) -> float:
    return end - time.perf_counter()


def _figures(device: torch.device, toy: bool, left: Callable[[], float]) -> Iterator[Figure]:
    parts: dict[str, Callable[[], Iterable[Figure]]] = {
        "kernels": lambda: bandwidth.rows(device, 1 << 16, 2) if toy else bandwidth.rows(device),
        "copies": lambda: beside.rows(device),
        "updates": lambda: updates.rows(device),
    }
    for name, part in parts.items():
        found: list[Figure] = []
        try:
            with within(min(PART, left())):
                found.extend(part())
        except (Exception, Overtime) as error:  # the other figures are measured all the same
            found += [Figure(f"{name}: {type(error).__name__}: {error}".partition("\n")[0][:200], 0.0, "failed")]
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
