"""The time of a step as a function of the budget, as data and as a table.

sweep.points      a Point for each budget, the largest first
sweep.knee        the point below which saving bytes begins to cost time
print(sweep)      the table
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from passes import Offload, PlanResult, Recompute
from passes.lp.solver import INSTALL, MISSING

from .tables import Printed, mb, mb_above, ms, table

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

COLUMNS = ("budget", "forecast", "step", "overhead", "bound", "gap", "kept", "recomputed", "offloaded", "decisions", "")


@dataclass(frozen=True, slots=True)
class Point:
    """The plan of one budget. If no plan fits, `us` is infinite and `peak` is a budget that works.

    Attributes:
        budget, peak: bytes allowed, and bytes forecast.
        us: microseconds of the step. lower_bound: its proven lower bound; see `passes.PlanResult`.
        overhead, gap: distance of `us` from the step without decisions, and from the bound: 0.1 is 10 %.
        kept, recomputed, offloaded: shares of the bytes that forward makes and backward reads.
        decisions: number of decisions.
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
        """True if a plan was found."""
        return self.us < math.inf

    @property
    def facts(self) -> dict[str, float | None]:
        """The fields for JSON; an infinite time is None."""
        return {name: None if value == math.inf else value for name, value in asdict(self).items()}


@dataclass(frozen=True)
class Sweep(Printed):
    """The time of a step for each budget, the largest first.

    Attributes:
        smallest: smallest budget in bytes for which a plan was found.
        needs, plain_us: bytes and microseconds of the step without decisions.
        greedy: True if HiGHS is not installed, so that the plans are greedy and no bound is proven.
    """

    points: tuple[Point, ...]
    smallest: int
    needs: int
    plain_us: float
    device: str = "cpu"
    greedy: bool = False

    @property
    def knee(self) -> Point | None:
        """Return the point furthest below the chord from the first to the last point that fits.

        Below it, saving bytes begins to cost time. If no point is below the chord it is the smallest budget that fits,
        and None if no budget fits.
        """
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
        """Return the points and the knee as JSON; an infinite time is null."""
        points = [point.facts for point in self.points]
        knee = None if self.knee is None else self.knee.budget
        return json.dumps({**asdict(self), "knee": knee, "points": points}, indent=1)

    def __repr__(self) -> str:
        return f"<Sweep: {len(self.points)} budgets, the smallest {mb_above(self.smallest)}>"

    def __rich__(self) -> RenderableType:
        title = f"as it is, the step needs {mb(self.needs)} and takes {ms(self.plain_us)}"
        title += f"; {mb_above(self.smallest)} will do"
        if self.greedy:
            title += f"\n{MISSING}: greedy plans, without a proven bound; {INSTALL}"
        lines, knee = table(title, *COLUMNS, right=COLUMNS[:-1]), self.knee
        has_knee = sum(point.fits for point in self.points) > 2
        for point in self.points:
            _add(
                lines,
                point,
                "knee" if point == knee and has_knee else "smallest" if point.budget == self.smallest else "",
            )
        return lines


def point_of_plan(budget: int, choice: PlanResult) -> Point:
    """Return the point of a budget for which there is a plan."""
    times = choice.forecast.us, choice.overhead, choice.lower_bound, choice.gap
    return Point(budget, choice.forecast.peak, *times, *_shares(choice), len(choice.plan))


def point_of_refusal(budget: int, smallest: int, plain_us: float) -> Point:
    """Return the point of a budget for which there is no plan."""
    return Point(budget, smallest, math.inf, math.inf, plain_us, math.inf)


def _shares(choice: PlanResult) -> tuple[float, float, float]:
    """Return the shares kept, recomputed and offloaded; a value that is both counts as offloaded."""
    trace = choice.captured.trace
    offloaded = {trace.op[said.value].holds[0] for said in choice.plan if isinstance(said, Offload)}
    rerun = {s.name for said in choice.plan if isinstance(said, Recompute) for s in trace.op[said.value].makes}
    every = sum(trace.saved.values()) or 1
    sent, recomputed = (sum(trace.saved.get(s, 0) for s in some) / every for some in (offloaded, rerun - offloaded))
    return max(0.0, 1 - sent - recomputed), recomputed, sent


def _add(lines: Table, point: Point, mark: str) -> None:
    if not point.fits:
        lines.add_row(mb(point.budget), *[""] * 9, "does not fit")
        return
    shares = (f"{share:.0%}" for share in (point.kept, point.recomputed, point.offloaded))
    ratios = f"{point.overhead:+.1%}", ms(point.lower_bound), f"{point.gap:.1%}"
    lines.add_row(mb_above(point.budget), mb(point.peak), ms(point.us), *ratios, *shares, str(point.decisions), mark)
