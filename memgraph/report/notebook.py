"""A report in a notebook: the verdict, a picture of memory over the step, and the tables, folded.

report   ->   "<b>fits: forecast 648.5 MB ...</b> <svg ...> <details>7 decisions ...</details>"

The picture shows bytes by kind over time, below the budget. Of many ops in one column the one with most bytes is drawn:
no peak is lost.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

from passes import KINDS, Forecast

from .peak_sentence import peak_sentence
from .printout import decisions_table, peak_table, verdict
from .report_data import ReportData
from .tables import mb, ms, printed

WIDTH, HEIGHT, COLUMNS = 720, 220, 240  # of the picture in pixels; steps of its curve
LEFT, TOP, BOTTOM = 70, 14, 24  # what the axes take
Place = Callable[[float], str]  # a coordinate of so many microseconds or bytes
CSS = Path(__file__).parent / "page/page.css"  # the colours are those of the page


def notebook_html(report: ReportData) -> str:
    """Return a report as HTML for a cell of a notebook."""
    first, *others = verdict(report).splitlines()
    folded = {
        "time, bounds and what else is known": "\n".join(others),
        f"{len(report.plan)} decisions": printed(decisions_table(report)),
        "on the device at the peak": printed(peak_table(report.forecast)),
    }
    details = "".join(
        f"<details><summary>{title}</summary><pre>{html.escape(text)}</pre></details>" for title, text in folded.items()
    )
    return f"<div><b>{html.escape(first)}</b><br>{picture(report)}{details}</div>"


def picture(report: ReportData) -> str:
    """Return memory over the step as an SVG, which needs no style or script beside it."""
    forecast = report.forecast
    columns = _columns(forecast)
    most = 1.08 * max(report.budget if report.budget < 2 * forecast.peak else 0, forecast.peak, 1)
    kinds = [kind for kind in KINDS if forecast.by_kind[kind].max(initial=0) > 0]

    def across(us: float) -> str:
        return f"{LEFT + us / (forecast.us or 1.0) * (WIDTH - LEFT):.1f}"

    def up(nbytes: float) -> str:
        return f"{HEIGHT - BOTTOM - nbytes / most * (HEIGHT - TOP - BOTTOM):.1f}"

    at = forecast.peak_index
    begin_us, said = forecast.begins[at], f"{mb(forecast.peak)}: {peak_sentence(forecast)}"
    parts = [_areas(forecast, kinds, columns, across, up)]
    if report.budget <= most:
        line = f'x1="{LEFT}" x2="{WIDTH}" y1="{up(report.budget)}" y2="{up(report.budget)}"'
        parts.append(f'<line {line} stroke="currentColor" stroke-dasharray="5 3"/>')
        parts.append(_text(4, up(report.budget), mb(report.budget), "budget"))
    else:
        parts.append(_text(4, up(forecast.peak), mb(forecast.peak), "peak"))
    parts.append(f'<circle cx="{across(begin_us)}" cy="{up(forecast.peak)}" r="3.5" fill="currentColor"/>')
    parts.append(_text(4, up(0), "0 B", ""))
    parts += [_text(LEFT, str(HEIGHT - 6), "0 ms", ""), _text(WIDTH - 70, str(HEIGHT - 6), ms(forecast.us), "")]
    legend = "".join(
        f'<span style="margin-right:12px;white-space:nowrap"><span style="color:{colours()[kind]}">&#9632;</span> '
        f"{kind}</span>"
        for kind in kinds
    )
    return (
        f'<svg role="img" aria-label="{html.escape(said)}" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-size="11" font-family="sans-serif">{"".join(parts)}</svg>'
        f"<div>{html.escape(said)}</div><div>{legend}</div>"
    )


def _columns(forecast: Forecast) -> list[int]:
    """Return the op of each column of the picture: of those that begin in it, the one with most bytes."""
    best: dict[int, int] = {}
    for i, begin_us in enumerate(forecast.begins):
        column = int(begin_us / (forecast.us or 1.0) * (COLUMNS - 1))
        if column not in best or forecast.total[i] > forecast.total[best[column]]:
            best[column] = i
    return [best[column] for column in sorted(best)]


def _areas(forecast: Forecast, kinds: list[str], columns: list[int], across: Place, up: Place) -> str:
    """Return an area for each kind, on top of the kinds before it."""
    begins = [forecast.begins[i] for i in columns]
    edges = [*zip(begins, [*begins[1:], forecast.us], strict=True)]
    below, drawn = [0] * len(columns), []
    for kind in kinds:
        above = [low + int(forecast.by_kind[kind][i]) for low, i in zip(below, columns, strict=True)]
        top = [f"{across(us)},{up(n)}" for edge, n in zip(edges, above, strict=True) for us in edge]
        base = [f"{across(us)},{up(n)}" for edge, n in zip(edges, below, strict=True) for us in edge]
        points = " ".join([*top, *reversed(base)])
        drawn.append(f'<polygon points="{points}" fill="{colours()[kind]}"><title>{kind}</title></polygon>')
        below = above
    return "".join(drawn)


def _text(x: int, y: str, text: str, title: str) -> str:
    return f'<text x="{x}" y="{y}" fill="currentColor">{html.escape(text)}<title>{title}</title></text>'


@cache
def colours() -> dict[str, str]:
    """Return the colour of each kind of memory on a light page."""
    light = CSS.read_text(encoding="utf-8").partition("@media")[0]
    found = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", light))
    return {kind: found[kind] for kind in KINDS}
