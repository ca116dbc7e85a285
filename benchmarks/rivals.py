"""Part B: compare memgraph with torch's activation_memory_budget, on a small GPT and Llama on this CPU.

    autoac 0.2   measured peak 190 MB, +35 ms   ->   memgraph with a budget of 190 MB, +21 ms

Each ratio runs first, and its measured peak is memgraph's budget, for recompute only. All steps share one model,
process, allocator and kernels, and are timed in turn: only decisions differ. Recompute time of both is by memgraph's
prices, measured in this process. `benchmarks.peers` has torch's ways as they are used, each in a process of its own.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

import memgraph
from benchmarks.autoac import AutoAC
from benchmarks.clock import Pairs, Step, in_turn, middle, peak, step_of
from benchmarks.nets import GPT, Size

SIZES = {
    "gpt": Size(6, 256, 8, vocabulary=1024, context=256),
    "llama": Size(6, 256, 8, vocabulary=1024, context=256, gated=True),
}
BATCH = 4
AMPLE = "20GB"
RATIOS = (0.6, 0.4, 0.2, 0.1, 0.05)
COLUMNS = (
    ("model", "beside", "peak MB", "ours MB", "of eager")
    + ("again ms", "ours again", "step ms", "ours step", "ours/theirs", "middle half")
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """A step: its measured bytes, its recompute time by memgraph's prices, and its seconds in each round."""

    peak: int
    added_us: float | None = None
    seconds: Sequence[float] = ()

    @property
    def ms(self) -> float:
        return 1e3 * middle(self.seconds)[1]


@dataclass(frozen=True)
class Row:
    """A way to save memory, and memgraph at its peak; `ours` is None where memgraph had no plan."""

    model: str
    beside: str
    eager: Run
    theirs: Run
    ours: Run | None

    @property
    def pairs(self) -> Pairs:
        """The seconds of both, paired by round."""
        assert self.ours is not None
        return Pairs(self.ours.seconds, self.theirs.seconds)


class Ring:
    """The steps of one model, to be timed in turn."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.name = name
        self.model = GPT(SIZES[name])
        self.batch: tuple[Tensor, ...] = tuple(
            torch.randint(SIZES[name].vocabulary, (BATCH, SIZES[name].context)) for _ in range(2)
        )
        self.steps: dict[str, Step] = {}
        self.runs: dict[str, Run] = {}
        self.add("eager", self.model)

    def add(self, name: str, called: Any) -> Run:
        """Measure a step after it has run once, because the first run compiles."""
        step = step_of(self.model, lambda: called(*self.batch))
        step()
        added = called.added_us if isinstance(called, AutoAC) else None
        self.steps[name] = step
        self.runs[name] = Run(peak(self.model, self.batch, step), added)
        begin = time.perf_counter()
        step()
        seconds = time.perf_counter() - begin
        print(f"{self.name} {name}: {self.runs[name].peak / 1e6:.1f} MB, {seconds:.2f} s", file=sys.stderr, flush=True)
        return self.runs[name]

    def add_ours(self, name: str, budget: int) -> None:
        """Add memgraph under a budget, if there is a plan."""
        ours = memgraph.compile(self.model, budget, offload=None)
        try:
            run = self.add(name, ours)
        except memgraph.BudgetError as error:
            print(f"{self.name} {name}: no plan, least {error.smallest / 1e6:.1f} MB", file=sys.stderr, flush=True)
            return
        self.runs[name] = Run(run.peak, self._added_us(ours.plan))

    def _added_us(self, plan: memgraph.Report) -> float:
        """Return a plan's recompute time by the rival's prices, because a later plan has prices of its own steps."""
        alone = memgraph.plan(self.model, *self.batch, budget=AMPLE, offload=None).choice.captured.trace.op
        return sum(alone[op.recomputes].us for op in plan.forecast.trace.ops if op.recomputes)

    def smallest(self) -> int:
        """Return the smallest budget, as memgraph's error gives it."""
        try:
            memgraph.plan(self.model, *self.batch, budget=1, offload=None)
        except memgraph.BudgetError as error:
            return error.smallest
        raise RuntimeError("a plan of one byte")

    def timed(self, rounds: int) -> None:
        for name, seconds in in_turn(self.steps, rounds).items():
            self.runs[name] = Run(self.runs[name].peak, self.runs[name].added_us, seconds)

    def row(self, beside: str, theirs: str, ours: str) -> Row:
        return Row(self.name, beside, self.runs["eager"], self.runs[theirs], self.runs.get(ours))


def rivals(rounds: int) -> list[Row]:
    """Compare with `activation_memory_budget`; the last row of a model compares the lowest peaks of both."""
    return [row for name in SIZES for row in _rivals(Ring(name), rounds)]


def _rivals(ring: Ring, rounds: int) -> list[Row]:
    for ratio in RATIOS:
        run = ring.add(f"autoac {ratio}", AutoAC(ring.model, ratio))
        ring.add_ours(f"ours {ratio}", run.peak)
    ring.add_ours("ours least", ring.smallest())
    ring.timed(rounds)
    lowest = min((f"autoac {ratio}" for ratio in RATIOS), key=lambda name: ring.runs[name].peak)
    rows = [ring.row(f"autoac {ratio}", f"autoac {ratio}", f"ours {ratio}") for ratio in RATIOS]
    return [*rows, ring.row("lowest", lowest, "ours least")]


def table(rows: list[Row]) -> Table:
    title = f"rivals: {', '.join(f'{n} {s.layers}x{s.width}' for n, s in SIZES.items())}, fp32, batch {BATCH} x 256"
    shown = Table(*COLUMNS, title=title, title_justify="left", box=None)
    for name in SIZES:
        eager = next(row.eager for row in rows if row.model == name)
        shown.add_row(name, "eager", _mb(eager.peak), "", "100%", "", "", f"{eager.ms:.0f}")
        for row in (row for row in rows if row.model == name):
            shown.add_row(name, row.beside, *_cells(row))
    return shown


def _cells(row: Row) -> list[str]:
    theirs, ours = row.theirs, row.ours
    share = f"{theirs.peak / row.eager.peak:.0%}"
    if ours is None:
        return [_mb(theirs.peak), "no plan", share, _ms(theirs.added_us), "", f"{theirs.ms:.0f}"]
    return [
        *(_mb(theirs.peak), _mb(ours.peak), share, _ms(theirs.added_us), _ms(ours.added_us)),
        *(f"{theirs.ms:.0f}", f"{ours.ms:.0f}", row.pairs.ratio_text, row.pairs.spread_text),
    ]


def verdict(rows: list[Row]) -> list[str]:
    """Summarize the results at equal peak, and the lowest peaks of both."""
    equal = [row for row in rows if row.beside != "lowest"]
    lower = [row for row in equal if row.ours is not None and row.pairs.ratio < 1]
    lines = [f"step time lower at equal peak: {len(lower)} of {len(equal)}"]
    less = [row for row in equal if row.ours and (row.ours.added_us or 0.0) <= (row.theirs.added_us or 0.0)]
    lines.append(f"no more recompute time at equal peak: {len(less)} of {len(equal)}")
    over = [row for row in equal if row.ours is not None and row.ours.peak > row.theirs.peak]
    lines.append(f"measured peak over the rival's: {len(over)} of {len(equal)}")
    lowest = [row for row in rows if row.beside == "lowest" and row.ours is not None]
    return lines + [
        f"{row.model}: lowest peak {_mb(row.ours.peak)} MB, theirs {_mb(row.theirs.peak)} MB"
        for row in lowest
        if row.ours is not None
    ]


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f}"


def _ms(us: float | None) -> str:
    return "" if us is None else f"{us / 1e3:.1f}"
