"""Part C: compare predicted with measured step time, in one run.

    gpt2   as it is  first 0.97  repriced 1.01     half of eager's activations  first 0.94  replanned 0.99

Half: parameters, buffers, batch, and half of what eager holds above them.  First: the prediction
before any step ran, over the steps of that plan. Repriced, replanned: the prediction from the op times of the second
step, over the steps of the plan that followed. The steps of both plans run in turn.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from rich.table import Table
from torch import Tensor
from torch.utils._pytree import tree_leaves

import memgraph
from benchmarks.clock import in_turn, middle, step_of
from memgraph.profile.memory_meter import resident_bytes
from memgraph.report.report import Report
from tests.support.zoo import CASES, Case, eager_peak, fresh

SHARE, AMPLE = 0.5, "20GB"
GOAL = 0.1
WHEN = ("first", "repriced", "half: first", "half: replanned")


@dataclass(frozen=True)
class Ratio:
    """The predicted time of a step, and its measured times, in microseconds."""

    model: str
    when: str
    predicted: float
    taken: list[float]

    @property
    def value(self) -> float:
        return self.predicted / self.median

    @property
    def median(self) -> float:
        return statistics.median(self.taken)


def forecast(rounds: int) -> list[Ratio]:
    """Return all ratios of every model."""
    return [ratio for case in CASES for ratio in _ratios(case, rounds)]


def _ratios(case: Case, rounds: int) -> list[Ratio]:
    model, batch = fresh(case)
    given = [leaf for leaf in tree_leaves((batch.args, dict(batch.kwargs))) if isinstance(leaf, Tensor)]
    there = resident_bytes([*model.parameters(), *model.buffers(), *given])
    budget = there + int(SHARE * eager_peak(case))
    print(case.name, file=sys.stderr, flush=True)

    def run(module: memgraph.CompiledModule) -> None:
        step_of(model, partial(batch.of, module))()

    plain = memgraph.compile(model, AMPLE, loss=case.loss)
    taken = _us({"plain": partial(run, plain)}, rounds)
    half = memgraph.compile(model, budget, loss=case.loss)
    run(half)
    first = memgraph.compile(model, budget, loss=case.loss, plan=half.plan.to_json())  # which is kept
    for _ in range(2):  # the first of them times the ops, and then it is planned again
        run(half)
    run(first)
    taken |= _us({"first": partial(run, first), "half": partial(run, half)}, rounds)
    predicted = (plain.plan.predicted_us, _again(plain.plan), first.plan.predicted_us, _again(half.plan))
    steps = (taken["plain"], taken["plain"], taken["first"], taken["half"])
    return [Ratio(case.name, *row) for row in zip(WHEN, predicted, steps, strict=True)]


def _us(steps: dict[str, partial[None]], rounds: int) -> dict[str, list[float]]:
    for step in steps.values():  # twice, so that a step is timed and planned again before it is measured
        step(), step()
    taken = in_turn(dict(steps), rounds)
    return {name: [1e6 * seconds for seconds in taken[name]] for name in taken}


def _again(report: Report) -> float:
    """Return the prediction from op times of a real step, for the same plan or the one that replaced it."""
    return report.predicted_us if report.repriced_us is None else report.repriced_us


def table(ratios: Sequence[Ratio]) -> Table:
    columns = [column for when in WHEN for column in (f"{when} ms", "took ms", "ratio", "middle half")]
    shown = Table("model", *columns, title="predicted over measured step time", box=None)
    for start in range(0, len(ratios), len(WHEN)):
        row = ratios[start : start + len(WHEN)]
        shown.add_row(row[0].model, *(cell for ratio in row for cell in _cells(ratio)))
    ends = [[ratio.value for ratio in ratios if ratio.when == when] for when in WHEN]
    shown.add_row("median", *(cell for values in ends for cell in _verdict(values)))
    return shown


def _cells(ratio: Ratio) -> tuple[str, ...]:
    low, _, high = middle(ratio.predicted / us for us in ratio.taken)
    return f"{ratio.predicted / 1e3:.1f}", f"{ratio.median / 1e3:.1f}", f"{ratio.value:.2f}", f"{low:.2f}-{high:.2f}"


def _verdict(values: Sequence[float]) -> tuple[str, ...]:
    low, median, high = middle(values)
    reached = "reached" if abs(median - 1) <= GOAL else "MISSED"
    return "", reached, f"{median:.2f}", f"{low:.2f}-{high:.2f}"
