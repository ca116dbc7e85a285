"""Measure plan time against depth: GPTs of 6 to 96 equal layers, and the time of each part of the planner.

gpt 24 layers, decomposed, 60 %  ->  0.21 s: 0.08 simulate, 0.04 linear, 0.03 whole, ...

    python -m benchmarks.depth FILE SHARE    # one plan in this process; prints a line of JSON

Times are CPU times, which other processes hardly change.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

from rich.table import Table

from benchmarks.simulated import run, trace_file
from passes import BudgetError, Machine, make_plan, parse, pipeline, predict
from passes.lp import memory_rows, solver
from passes.schedule import candidate
from passes.search import optimize

DEPTHS = (6, 12, 24, 48, 96)
FORMS = ("", "-d")
SHARES = (0.6, 0.4, 0.3)
# What each part of the time is spent in.  "other": the trace as numbers, and what a point puts at every position.
PARTS: dict[str, tuple[tuple[Any, str], ...]] = {
    "check": ((pipeline, "check"),),
    "simulate": ((pipeline, "predict"), *((candidate, name) for name in ("schedule", "apply", "predict"))),
    "rows": ((optimize, "PlanModel"), (memory_rows.MemoryRows, "add"), (memory_rows.MemoryRows, "add_any_plan")),
    "linear": ((solver.LPSolver, "solve"),),
    "whole": ((solver.LPSolver, "solve_integers"),),
    "mend": ((optimize, "greedy_from"), (optimize, "retime_copies")),
}


@dataclass(frozen=True)
class Row:
    """The results for a depth and a budget: nodes, gap in percent, total seconds, and seconds by part."""

    depth: int
    form: str
    share: float
    runs: list[dict[str, Any]]

    def seconds(self, part: str) -> float:
        return median(found["parts"][part] for found in self.runs)

    @property
    def total(self) -> float:
        return median(found["seconds"] for found in self.runs)


@dataclass
class Clock:
    """CPU seconds by part; a part's time is without that of the parts that it calls."""

    spent: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    inner: list[float] = field(default_factory=lambda: [0.0])

    def of(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.process_time()
            self.inner.append(0.0)
            try:
                return call(*args, **kwargs)
            finally:
                took = time.process_time() - begin
                self.spent[part] += took - self.inner.pop()
                self.inner[-1] += took

        return timed

    @contextmanager
    def running(self) -> Iterator[None]:
        with ExitStack() as stack:
            for part, calls in PARTS.items():
                for at, name in calls:
                    stack.enter_context(mock.patch.object(at, name, self.of(part, getattr(at, name))))
            yield


def main(file: str, share: str) -> None:
    trace = parse(Path(file).read_text())
    inputs = sum(op.nbytes for op in trace.ops if op.is_input)
    plain = predict(trace, Machine(1 << 62))
    machine = Machine(inputs + int(float(share) * (plain.peak - inputs)), "cuda", "host")
    clock, gap = Clock(), None
    begin = time.process_time()
    with clock.running(), suppress(BudgetError):  # then there is no gap
        gap = 100 * make_plan(trace, machine).gap
    seconds = time.process_time() - begin
    parts = clock.spent | {"other": seconds - sum(clock.spent.values())}
    print(json.dumps({"nodes": len(trace.ops), "gap": gap, "seconds": seconds, "parts": parts}))


def depths(rounds: int, folder: Path | None) -> list[Row]:
    """Measure every budget of every depth, one process at a time."""
    with tempfile.TemporaryDirectory() as temporary:
        return [row for depth in DEPTHS for form in FORMS for row in _depth(depth, form, rounds, folder or temporary)]


def _depth(depth: int, form: str, rounds: int, folder: Path | str) -> list[Row]:
    file = trace_file(f"deep{depth}{form}", Path(folder))
    rows = [Row(depth, form, share, []) for share in SHARES]
    for row in rows * rounds:
        row.runs.append(json.loads(run("benchmarks.depth", str(file), str(row.share))))
    return rows


def table(rows: list[Row]) -> Table:
    title = "GPT of equal layers; seconds of the processor to plan, medians; budgets as in `simulated`"
    columns = ("layers", "nodes", "budget", "gap %", "plan s", "ms/node", *PARTS, "other")
    shown = Table(*columns, title=title, title_justify="left", box=None)
    for row in rows:
        found = row.runs[0]
        shown.add_row(
            f"{row.depth}{row.form}",
            str(found["nodes"]),
            f"{row.share:.0%}",
            "no plan" if found["gap"] is None else f"{found['gap']:.2f}",
            f"{row.total:.2f}",
            f"{1e3 * row.total / found['nodes']:.2f}",
            *(f"{row.seconds(part):.2f}" for part in (*PARTS, "other")),
        )
    return shown


if __name__ == "__main__":
    main(*sys.argv[1:])
