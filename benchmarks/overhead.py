"""What memgraph costs when nothing is needed: the step's time as a ratio to eager's.

    python -m benchmarks.overhead [NAME ...] [--rounds 20]

Eager and memgraph run in turn in one process, forward and backward, with the same seeds; the ratio is taken in each
round, and the table gives its median and its middle half.  The budget is large, so the emitted graph must hold no
memory ops.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import memgraph
from tests.zoo import CASES, Case, fresh


def main(names: Annotated[list[str] | None, typer.Argument()] = None, rounds: int = 20) -> None:
    """Print one table."""
    title = f"torch {torch.__version__}, {torch.get_num_threads()} threads, {rounds} rounds"
    table = Table("model", "eager ms", "memgraph ms", "ratio", "middle half", "memory ops", title=title, box=None)
    every = []
    for case in CASES:
        if not names or case.name in names:
            ratios = _compare(case, rounds, table)
            every.append(statistics.median(ratios))
    table.add_row("median", "", "", f"{statistics.median(every):.3f}", "", "")
    Console(width=120).print(table)


def _compare(case: Case, rounds: int, table: Table) -> list[float]:
    plain, batch = fresh(case)
    model, _ = fresh(case)
    ours = memgraph.compile(model, "20GB", loss=case.loss)
    runs: list[Callable[[], float]] = [
        lambda: _us(plain, lambda: case.loss(batch.of(plain))),
        lambda: _us(model, lambda: batch.of(ours)),
    ]
    for run in runs * 2:
        run()
    pairs = []
    for turn in range(rounds):
        order = (0, 1) if turn % 2 else (1, 0)
        times = {which: runs[which]() for which in order}
        pairs.append((times[0], times[1]))
    ratios = [us / eager for eager, us in pairs]
    low, _, high = statistics.quantiles(ratios, n=4)
    eager, us = (statistics.median(times) / 1e3 for times in zip(*pairs, strict=True))
    found = sum(op.fn.startswith("memgraph.") for op in ours.plan.forecast.trace.ops)
    table.add_row(
        case.name, f"{eager:.1f}", f"{us:.1f}", f"{statistics.median(ratios):.3f}", f"{low:.3f}-{high:.3f}", str(found)
    )
    return ratios


def _us(model: nn.Module, loss_of: Callable[[], Tensor]) -> float:
    model.zero_grad()
    torch.manual_seed(0)
    begin = time.perf_counter()
    loss_of().backward()
    return (time.perf_counter() - begin) * 1e6


if __name__ == "__main__":
    typer.run(main)
