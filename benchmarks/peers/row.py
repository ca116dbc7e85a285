"""A peer beside eager, and memgraph at the peak of that peer; rows print as a table.

    Row("gpt", "checkpoint", eager=137.0 MB, peak=61.3 MB, over_eager=1.31, ours=61.2 MB, over_peer=0.87)

Each ratio is of two steps of one round, so that other work on the machine slows both: the median of all rounds, and
the ends of the middle half.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Self

from rich.table import Table

from benchmarks.clock import Pairs, middle

COLUMNS = (
    ("model", "peer", "peak MB", "of eager", "step ms", "over eager", "ours MB", "ours over peer", "its CPU")
    + ("ours over eager", "forecast", "repriced", "anon MB", "ours anon", "faults", "ours faults")
)  # fmt: skip


@dataclass(frozen=True)
class Ratio:
    """The median of the ratios of all rounds, between the ends of their middle half."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, ours: list[float], theirs: list[float]) -> Self:
        """Return the ratio of seconds that are paired by round."""
        return cls(*(round(value, 4) for value in middle(Pairs(ours, theirs).ratios)))

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.spread})"

    @property
    def spread(self) -> str:
        return f"{self.low:.3f}-{self.high:.3f}"


@dataclass(frozen=True)
class Row:
    """A peer and memgraph at its peak.

    Attributes:
        eager, peak, ours: peak bytes of the process: eager's, the peer's, memgraph's with the peer's as its budget.
        anonymous, ours_anonymous: high water of the anonymous bytes of the timed process in all steps, above those
            that are left without its model.
        forecast: bytes that memgraph forecasts, in that process.
        ms: median of the peer's step.
        alone_ms, forecast_ms: median of memgraph's steps that follow each other, and what it forecast before any.
        repriced_ms: the forecast at the times that its own ops took in one of the first steps.
        cpu_over_peer: ratio of the processor seconds, of all threads.
        faults, ours_faults: new pages of a step, at the median.
        why: why memgraph or the peer did not run, in words.
    """

    model: str
    peer: str
    eager: int
    peak: int | None = None
    ms: float | None = None
    over_eager: Ratio | None = None
    ours: int | None = None
    over_peer: Ratio | None = None
    ours_over_eager: Ratio | None = None
    why: str = ""
    anonymous: int | None = None
    ours_anonymous: int | None = None
    forecast: int | None = None
    alone_ms: float | None = None
    forecast_ms: float | None = None
    cpu_over_peer: Ratio | None = None
    faults: int | None = None
    ours_faults: int | None = None
    repriced_ms: float | None = None

    @property
    def is_over(self) -> bool:
        """Return True if memgraph exceeded its budget."""
        return self.ours is not None and self.peak is not None and self.ours > self.peak

    @property
    def facts(self) -> dict[str, Any]:
        """Return the row for JSON."""
        return asdict(self)

    @classmethod
    def read(cls, facts: dict[str, Any]) -> Self:
        """Return the row of such facts."""
        own: dict[str, Any] = {
            key: Ratio(**value) if isinstance(value, dict) else value for key, value in facts.items()
        }
        return cls(**own)


def table(rows: Iterable[Row], title: str) -> Table:
    """Return a line for each row."""
    shown = Table(*COLUMNS, title=title, title_justify="left", box=None)
    for row in rows:
        share = "" if row.peak is None else f"{row.peak / row.eager:.0%}"
        off, repriced = _off(row.forecast_ms, row.alone_ms), _off(row.repriced_ms, row.alone_ms)
        ours = row.why if row.ours is None else _mb(row.ours)
        shown.add_row(
            row.model, row.peer, _mb(row.peak), share, _number(row.ms), _text(row.over_eager), ours,
            _text(row.over_peer), "" if row.cpu_over_peer is None else f"{row.cpu_over_peer.median:.3f}",
            _text(row.ours_over_eager), off, repriced, _mb(row.anonymous), _mb(row.ours_anonymous), _number(row.faults),
            _number(row.ours_faults),
        )  # fmt: skip
    return shown


def _off(forecast: float | None, taken: float | None) -> str:
    return "" if forecast is None or taken is None else f"{forecast / taken - 1:+.1%}"


def _text(ratio: Ratio | None) -> str:
    return "" if ratio is None else str(ratio)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


def _mb(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / 1e6:.1f}"
