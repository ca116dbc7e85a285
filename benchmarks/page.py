"""Benchmark the page of a report in Chromium: bytes of the file, first paint, and time of a hover.

    python -m benchmarks.page [--ops 20000 --ops 100000] [--rounds 5]

Steps are made of equal layers, without a model; some values are recomputed and some offloaded. Each round opens the
page in a new context, offline:

- written: seconds of the processor that `Report.to_html` takes.
- first paint: from navigation to the browser's `first-contentful-paint`. It may show the head without the charts.
- drawn: from navigation until the charts are on their canvases.
- hover: from a `mousemove` event at the chart until its handlers have run and the page is laid out again. The median,
  the 95th of 100, and the largest of 200, over the whole width.

Where other work shares the cores, the least of the rounds is nearer to what a page takes than their median. The page of
100 ops shows what the browser itself takes here. Goals: 20,000 ops in 1 MB, painted within 300 ms, a hover
within 16 ms; 100,000 ops painted within 1 s. A goal that is missed is printed as such; the exit status is 0.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import process_time
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks import records
from tests.support.chromium import browser
from tests.support.long_steps import long_report

MB, PAINT_MS, HOVER_MS = 1.0, 300.0, 16.0  # goals for SMALL ops
SMALL, LARGE_PAINT_MS = 20_000, 1000.0
TINY = 100  # ops of a page whose times are nearly all the browser's own
MARKS = ("first-contentful-paint", "drawn")
SEEN = "(name) => performance.getEntriesByName(name).map((each) => each.startTime)[0]"
HOVER = """() => {
  const over = document.querySelector('#memory .u-over'), taken = [];
  const { left, top, width } = over.getBoundingClientRect();
  for (let i = 0; i < 200; i++) {
    const clientX = left + ((i * 67) % 200 + 0.5) / 200 * width;
    const event = new MouseEvent('mousemove', { clientX, clientY: top + 90, bubbles: true, movementX: 1 });
    const begin = performance.now();
    over.dispatchEvent(event);
    document.body.getBoundingClientRect();
    taken.push(performance.now() - begin);
  }
  return taken;
}"""


@dataclass(frozen=True)
class Row:
    """The figures of one page; times in milliseconds are medians over rounds, or the least of them."""

    ops: int
    decisions: int
    nbytes: int
    written_s: float
    paint_ms: float
    drawn_ms: float
    least_paint_ms: float
    least_drawn_ms: float
    hover_ms: float
    hover_95_ms: float
    hover_largest_ms: float


def main(
    ops: Annotated[
        list[int] | None, typer.Option(help="About how many ops; 100, 20,000 and 100,000 if not given.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
) -> None:
    """Open pages of large steps in Chromium."""
    console = Console(width=120)
    with tempfile.TemporaryDirectory() as folder, browser() as chromium:
        rows = [_row(chromium, Path(folder) / "plan.html", count, rounds) for count in ops or [TINY, SMALL, 100_000]]
    shown = Table(
        "ops", "decisions", "MB", "written", "first paint", "drawn", "hover", "95th", "largest", title="pages"
    )
    for row in rows:
        starts = ((row.paint_ms, row.least_paint_ms), (row.drawn_ms, row.least_drawn_ms))
        times = [f"{middle:.0f} ms, least {least:.0f}" for middle, least in starts]
        times += [f"{each:.1f} ms" for each in (row.hover_ms, row.hover_95_ms, row.hover_largest_ms)]
        shown.add_row(str(row.ops), str(row.decisions), f"{row.nbytes / 1e6:.3f}", f"{row.written_s:.2f} s", *times)
    console.print(shown)
    console.print("\n".join(line for row in rows for line in _verdict(row)) or "all goals are met")
    console.print(f"in {records.write('page', 'chromium', list(map(asdict, rows)))}")


def _row(chromium: Any, path: Path, ops: int, rounds: int) -> Row:
    layers = max(4, int(ops / 9.67))  # a layer is eight ops, and those that decisions add
    report = long_report(layers)
    began = process_time()
    report.to_html(path)
    written = process_time() - began
    taken = [_opened(chromium, path) for _ in range(rounds)]
    paint, drawn, *hovers = (median(column) for column in zip(*taken, strict=True))
    least = [min(column) for column in list(zip(*taken, strict=True))[:2]]
    count = len(report.forecast.trace.ops)
    return Row(count, len(report.plan), path.stat().st_size, written, paint, drawn, *least, *hovers)


def _opened(chromium: Any, path: Path) -> tuple[float, ...]:
    """Open a page in a new context; return its first paint, when it was drawn, and times of a hover."""
    context = chromium.new_context(viewport={"width": 1280, "height": 900}, offline=True)
    page = context.new_page()
    page.goto(path.as_uri())
    paint, drawn = (float(page.wait_for_function(SEEN, arg=mark).json_value()) for mark in MARKS)
    page.wait_for_timeout(300)  # the table is filled after the charts
    taken = page.evaluate(HOVER)
    context.close()
    return paint, drawn, *(sorted(taken)[int(share * (len(taken) - 1))] for share in (0.5, 0.95, 1.0))


def _verdict(row: Row) -> list[str]:
    if row.ops < SMALL / 2:
        return []
    small = row.ops <= 1.1 * SMALL
    goals = [
        ("first paint", row.paint_ms, PAINT_MS if small else LARGE_PAINT_MS),
        ("drawn", row.drawn_ms, PAINT_MS if small else LARGE_PAINT_MS),
    ]
    goals += [("MB", row.nbytes / 1e6, MB), ("hover", row.hover_95_ms, HOVER_MS)] * small
    return [
        f"missed at {row.ops} ops: {name} {value:.1f}, goal {goal:.1f}" for name, value, goal in goals if value > goal
    ]


if __name__ == "__main__":
    typer.run(main)
