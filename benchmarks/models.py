"""Twelve models under shares of eager's activation peak: bit-equal to eager, measured <= forecast <= budget.

    python -m benchmarks.models [NAME ...] [--share 0.3] [--rounds 7]

Some AdamW steps each, from the same seeds.  MB are of the whole step without the optimizer; `error` is forecast over
measured.  Then forward and backward of both run in turn: `step/eager` is the median ratio of a round, with the
middle half after it.
"""

from __future__ import annotations

import platform
import sys
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

import memgraph
from benchmarks.clock import Pairs, in_turn, step_of
from memgraph import BudgetError
from tests.support.promise import trial
from tests.support.zoo import BESIDE, CASES, Case, fresh

SHARES = (1.0, 0.75, 0.5, 0.3)
WARM = 3  # steps: planned, timed op by op, and perhaps planned again
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
    "middle half",
    "plan s",
    "again",
    "away",
)


def main(
    names: Annotated[list[str] | None, typer.Argument()] = None, share: list[float] | None = None, rounds: int = 7
) -> None:
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
            pairs = _paired(case, row.budget, rounds)
            kept = row.measured <= row.forecast <= row.budget
            broken += not (kept and row.equal)
            table.add_row(
                case.name,
                f"{part:.0%}",
                *(f"{n / 1e6:.2f}" for n in (row.eager, row.budget, row.forecast, row.measured)),
                str(row.forecast - row.measured),
                str(kept),
                str(row.equal),
                pairs.ratio_text,
                pairs.spread_text,
                f"{row.planned_us / 1e6:.1f}",
                str(row.recomputes),
                str(row.offloads),
            )
            print(".", end="", file=sys.stderr, flush=True)
    Console(width=150).print(table)
    raise typer.Exit(broken > 0)


def _paired(case: Case, budget: int, rounds: int) -> Pairs:
    """Time forward and backward under a budget in turn with eager's."""
    plain, batch = fresh(case)
    model, _ = fresh(case)
    ours = memgraph.compile(model, budget, loss=case.loss)
    steps = {
        "eager": step_of(plain, lambda: case.loss(batch.of(plain))),
        "ours": step_of(model, lambda: batch.of(ours)),
    }
    taken = in_turn(steps, rounds, warm=WARM)
    return Pairs(taken["ours"], taken["eager"])


if __name__ == "__main__":
    typer.run(main)
