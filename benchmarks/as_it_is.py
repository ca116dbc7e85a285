"""Compare the memory of a captured step without a plan with eager's.

    python -m benchmarks.as_it_is [NAME ...]

MB are of the whole step without the optimizer: eager's as measured, the captured step's as forecast and as measured in
the same loop.  The last column is whether a budget of eager's own peak is enough.
"""

from __future__ import annotations

from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils._pytree import tree_leaves

import memgraph
from memgraph.profile.memory_meter import resident_bytes
from tests.support.zoo import BESIDE, CASES, LONG_QUEUE, Case, eager_peak, fresh

COLUMNS = ("model", "eager MB", "forecast MB", "measured MB", "measured - eager B", "eager's is enough")


def main(names: Annotated[list[str] | None, typer.Argument()] = None) -> None:
    """Print one table; exit with 1 if a step takes more than eager, or does not fit a budget of eager's peak."""
    table, over = Table(*COLUMNS, box=None), 0
    for case in (*CASES, *BESIDE, LONG_QUEUE):
        if not names or case.name in names:
            eager, forecast, measured = peaks(case)
            enough = is_enough(case, eager)
            over += measured > eager or not enough
            megabytes = (f"{nbytes / 1e6:.2f}" for nbytes in (eager, forecast, measured))
            table.add_row(case.name, *megabytes, str(measured - eager), str(enough))
    Console(width=120).print(table)
    raise typer.Exit(over > 0)


def peaks(case: Case) -> tuple[int, int, int]:
    """Return the peaks of an eager step, and of a captured one as forecast and as measured."""
    model, batch = fresh(case)
    given = [leaf for leaf in tree_leaves((batch.args, dict(batch.kwargs))) if isinstance(leaf, Tensor)]
    eager = resident_bytes([*model.parameters(), *model.buffers(), *given]) + eager_peak(case)
    compiled = memgraph.compile(model, budget=None)
    case.loss(batch.of(compiled)).backward()
    if compiled.plan.measured is None:
        raise RuntimeError(f"the step of {case.name} can't be measured while another profiler runs")
    return eager, compiled.plan.choice.captured.peak, compiled.plan.measured


def is_enough(case: Case, budget: int) -> bool:
    """Return True if a step fits such a budget, in the same loop."""
    model, batch = fresh(case)
    torch.manual_seed(0)
    compiled = memgraph.compile(model, budget)
    try:
        case.loss(batch.of(compiled)).backward()
    except memgraph.BudgetError:
        return False
    return compiled.plan.measured is not None and compiled.plan.measured <= budget


if __name__ == "__main__":
    typer.run(main)
