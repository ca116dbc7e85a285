"""Twelve models under shares of eager's activation peak: bit-equal to eager, measured <= forecast <= budget.

    python -m benchmarks.models [NAME ...] [--share 0.3]

Three AdamW steps each, from the same seeds.  MB are of the whole step without the optimizer; `error` is forecast over
measured.
"""

from __future__ import annotations

import platform
import sys
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from memgraph import BudgetError
from tests.promise import trial
from tests.zoo import BESIDE, CASES

SHARES = (1.0, 0.75, 0.5, 0.3)
COLUMNS = (
    "model",
    "share",
    "eager MB",
    "budget MB",
    "forecast MB",
    "measured MB",
    "error B",
    "kept",
    "bit-equal",
    "step/eager",
    "plan s",
    "again",
    "away",
)


def main(names: Annotated[list[str] | None, typer.Argument()] = None, share: list[float] | None = None) -> None:
    """Print one table; exit with 1 if a promise is broken."""
    table = Table(
        *COLUMNS, title=f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}", box=None
    )
    broken = 0
    for case in (*CASES, *BESIDE):
        for part in (share or SHARES) if not names or case.name in names else ():
            try:
                row = trial(case, part)
            except BudgetError as error:
                table.add_row(case.name, f"{part:.0%}", "", "", f"least {error.smallest / 1e6:.2f}")
                broken += 1
                continue
            kept = row.measured <= row.forecast <= row.budget
            broken += not (kept and row.equal)
            table.add_row(
                case.name,
                f"{part:.0%}",
                *(f"{n / 1e6:.2f}" for n in (row.eager, row.budget, row.forecast, row.measured)),
                str(row.forecast - row.measured),
                str(kept),
                str(row.equal),
                f"{row.us / row.eager_us:.2f}",
                f"{row.planned_us / 1e6:.1f}",
                str(row.recomputes),
                str(row.offloads),
            )
            print(".", end="", file=sys.stderr, flush=True)
    Console(width=150).print(table)
    raise typer.Exit(broken > 0)


if __name__ == "__main__":
    typer.run(main)
