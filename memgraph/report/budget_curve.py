"""The budget -> time curve of a step, as data and as a table.

    sweep.points      a Point for each budget, the largest first
    sweep.knee        the one below which bytes begin to cost
    print(sweep)      the table

`sweep.py` makes it.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass

from rich.console import RenderableType
from rich.table import Table

from passes import Offload, PlanResult, Recompute
from passes.lp.solver import INSTALL, MISSING

from .tables import mb, ms, printed, table

COLUMNS = ("budget", "forecast", "step", "overhead", "bound", "gap", "kept", "recomputed", "offloaded", "decisions", "")


@dataclass(frozen=True, slots=True)
class Point:
    """What a budget comes to.  Where no plan fits, the time is infinite, and `peak` is a budget that would do.

    Attributes:
        budget, peak: the bytes that are allowed, and the forecast.
        us: the step in microseconds. lower_bound: what no plan of this one's class goes below; see `passes.PlanResult`.
        overhead, gap: how far `us` is above the step as it is, and above the bound: 0.1 is 10 %.
        kept, recomputed, offloaded: what becomes of forward's bytes that backward reads, as shares of them.
        decisions: how many there are.
    """

    budget: int
    peak: int
    us: float
    overhead: float
    lower_bound: float
    gap: float
    kept: float = 0.0
    recomputed: float = 0.0
    offloaded: float = 0.0
    decisions: int = 0

    @property
    def fits(self) -> bool:
        """Whether a plan was found."""
        return self.us < math.inf


@dataclass(frozen=True)
class Sweep:
    """A step's time for each budget, the largest first.

    Attributes:
        smallest: the smallest budget for which a plan was found, in bytes; `compile` finds it as well.
        needs, plain_us: the bytes and the microseconds of the step as it is.
        greedy: whether the plans were made without a search, as HiGHS is not installed: nothing is proven then.
    """

    points: tuple[Point, ...]
    smallest: int
    needs: int
    plain_us: float
    device: str = "cpu"
    greedy: bool = False

    @property
    def knee(self) -> Point | None:
        """The point of largest curvature, below which bytes begin to cost: of those that fit the one furthest below
        the chord from the first to the last; the smallest, if none lies below it.  None if no budget fits."""
        fitting = [point for point in self.points if point.fits]
        if not fitting:
            return None
        first, last = fitting[0], fitting[-1]
        slope = (last.us - first.us) / (last.budget - first.budget) if len(fitting) > 1 else 0.0

        def above(point: Point) -> float:
            return point.us - first.us - slope * (point.budget - first.budget)

        lowest = min(fitting[1:-1], key=lambda point: (above(point), point.budget), default=last)
        return lowest if above(lowest) < 0 else last

    def to_json(self) -> str:
        """All of it, with the knee's budget; an infinite time is null."""
        points = [
            {name: None if value == math.inf else value for name, value in asdict(p).items()} for p in self.points
        ]
        knee = None if self.knee is None else self.knee.budget
        return json.dumps({**asdict(self), "knee": knee, "points": points}, indent=1)

    def __str__(self) -> str:
        return printed(self)

    def __rich__(self) -> RenderableType:
        title = f"as it is, the step needs {mb(self.needs)} and takes {ms(self.plain_us)}; {mb(self.smallest)} will do"
        if self.greedy:
            title += f"\n{MISSING}: greedy plans, of which nothing is proven; {INSTALL}"
        lines, knee = table(title, *COLUMNS, right=COLUMNS[:-1]), self.knee
        for point in self.points:
            _add(lines, point, "knee" if point == knee else "smallest" if point.budget == self.smallest else "")
        return lines


def point_of_plan(budget: int, choice: PlanResult) -> Point:
    """The point of a plan."""
    times = choice.forecast.us, choice.overhead, choice.lower_bound, choice.gap
    return Point(budget, choice.forecast.peak, *times, *_shares(choice), len(choice.plan))


def point_of_refusal(budget: int, smallest: int, plain_us: float) -> Point:
    """The point of a budget for which there is no plan."""
    return Point(budget, smallest, math.inf, math.inf, plain_us, math.inf)


def _shares(choice: PlanResult) -> tuple[float, float, float]:
    """Kept, recomputed, offloaded; what is both sent away and run again counts as sent away."""
    trace = choice.captured.trace
    gone = {trace.op[said.value].holds[0] for said in choice.plan if isinstance(said, Offload)}
    again = {s.name for said in choice.plan if isinstance(said, Recompute) for s in trace.op[said.value].makes} - gone
    every = sum(trace.saved.values()) or 1
    away, made = (sum(trace.saved.get(storage, 0) for storage in some) / every for some in (gone, again))
    return max(0.0, 1 - away - made), made, away


def _add(lines: Table, point: Point, mark: str) -> None:
    if not point.fits:
        lines.add_row(mb(point.budget), *[""] * 9, "does not fit")
        return
    shares = (f"{share:.0%}" for share in (point.kept, point.recomputed, point.offloaded))
    ratios = f"{point.overhead:+.1%}", ms(point.lower_bound), f"{point.gap:.1%}"
    lines.add_row(mb(point.budget), mb(point.peak), ms(point.us), *ratios, *shares, str(point.decisions), mark)
