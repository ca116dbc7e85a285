"""Measure memgraph's overhead under a large budget: the ratio of the step's time to eager's.

    python -m benchmarks.overhead [NAME ...] [--rounds 20]

Eager and memgraph run in turn in one process, forward and backward, with the same seeds; the ratio is taken in each
round, and the table gives its median and its middle half. The budget is large, so the graph must have no memory ops.
"""

from __future__ import annotations

import statistics
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import nn

import memgraph
from benchmarks.clock import Pairs, in_turn, ms_text
from tests.support.zoo import CASES, Case, fresh


def main(names: Annotated[list[str] | None, typer.Argument()] = None, rounds: int = 20) -> None:
    """Print one table."""
    title = f"torch {torch.__version__}, {torch.get_num_threads()} threads, {rounds} rounds"
    table = Table("model", "eager ms", "memgraph ms", "ratio", "middle half", "memory ops", title=title, box=None)
    every = []
    for case in CASES:
        if not names or case.name in names:
            every.append(_compare(case, rounds, table))
    table.add_row("median", "", "", f"{statistics.median(every):.3f}", "", "")
    Console(width=120).print(table)


def _compare(case: Case, rounds: int, table: Table) -> float:
    """Add a row for a model, and return its median ratio."""
    plain, batch = fresh(case)
    model, _ = fresh(case)
    ours = memgraph.compile(model, "20GB", loss=case.loss)

    def eager_step() -> None:
        _begin(plain)
        case.loss(batch.of(plain)).backward()

    def our_step() -> None:
        _begin(model)
        batch.of(ours).backward()

    taken = in_turn({"eager": eager_step, "ours": our_step}, rounds, warm=2)
    pairs = Pairs(taken["ours"], taken["eager"])
    found = sum(op.fn.startswith("memgraph.") for op in ours.plan.forecast.trace.ops)
    table.add_row(
        case.name, ms_text(pairs.theirs), ms_text(pairs.ours), pairs.ratio_text, pairs.spread_text, str(found)
    )
    return pairs.ratio


def _begin(model: nn.Module) -> None:
    model.zero_grad()
    torch.manual_seed(0)


if __name__ == "__main__":
    typer.run(main)
