"""Draw the history of a machine: ratios of each model over its runs, a line for each peer.

    svg(History(about).read())    # "<svg ...>", 1280 px wide

Left is memgraph over the peer, at the peak of the peer; right the peer over eager.  Vertical bars are middle halves.
Only runs with the setting of the last one are drawn.  Ratios have a logarithmic axis, with a thick line at 1, and
colours follow the reader's light or dark scheme.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element, SubElement, tostring

from .history import Kept
from .row import Ratio

WIDTH, HEIGHT, HEAD = 1280, 320, 64  # of the drawing, of a panel, and above the panels
LEFT, RIGHT, TOP, BOTTOM = 56, 112, 36, 56  # margins of a panel, for ratios, names of peers, title, runs
APART = 15  # between two names
BAR = 5  # between the bars of two peers
LABELS = 5  # of runs below a panel, at most
TICKS = (0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.4, 1.7, 2.0, 3.0, 4.0, 6.0, 9.0, 15.0)
TITLE = "Memgraph beside its peers, run by run"
FIELDS = {"over_peer": "memgraph over the peer, at the peer's peak", "over_eager": "the peer over eager"}
LIGHT = ("#0b5394", "#b34700", "#117733", "#882255", "#5b4bb7", "#6b5a00")
DARK = ("#7cb7ff", "#ffab66", "#5fc97a", "#f08cc0", "#b9adff", "#dccb55")
STYLE = """
svg { --page: #ffffff; --ink: #1b1c20; --quiet: #555c66; --grid: #e4e7eb;
  background: var(--page); font: 13px system-ui, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
text { fill: var(--ink); } .quiet { fill: var(--quiet); } .title { font-size: 17px; font-weight: 600; }
.panel { font-weight: 600; } .grid { stroke: var(--grid); } .one { stroke: var(--quiet); stroke-width: 1.5; }
.line { stroke: var(--own); stroke-width: 2; fill: none; } .dot, .name { fill: var(--own); }
"""


def svg(kept: Sequence[Kept]) -> str:
    """Return the drawing; runs follow each other at equal distances."""
    shown = [each for each in kept if each.about["setting"] == kept[-1].about["setting"]]
    models = list(dict.fromkeys(each.row.model for each in shown))
    height = HEAD + HEIGHT * len(models)
    root = Element("svg", {
        "xmlns": "http://www.w3.org/2000/svg", "role": "img", "aria-labelledby": "title about",
        "width": f"{WIDTH}", "height": f"{height}", "viewBox": f"0 0 {WIDTH} {height}",
    })  # fmt: skip
    SubElement(root, "title", {"id": "title"}).text = TITLE
    SubElement(root, "desc", {"id": "about"}).text = _about(shown)
    SubElement(root, "style").text = _style()
    _text(root, 16, 28, TITLE, "title")
    _text(root, 16, 50, _about(shown), "quiet")
    for i, model in enumerate(models):
        for j, field in enumerate(FIELDS):
            _Panel(j * WIDTH / 2, HEAD + i * HEIGHT, shown, model, field).draw(root)
    return tostring(root, encoding="unicode") + "\n"


def _about(kept: Sequence[Kept]) -> str:
    if not kept:
        return "no run is kept"
    last, runs = kept[-1].about, len(_runs(kept))
    return f"{last['machine']}, torch {last['torch']}; {last['setting']}; runs: {runs}; bars are middle halves"


def _style() -> str:
    dark = "--page: #14161a; --ink: #e8eaed; --quiet: #a9b1bb; --grid: #2a2e35;"
    own = ["".join(f".peer{i} {{ --own: {colour}; }} " for i, colour in enumerate(of)) for of in (LIGHT, DARK)]
    return f"{STYLE}{own[0]}\n@media (prefers-color-scheme: dark) {{ svg {{ {dark} }}\n{own[1]}}}\n"


def _runs(kept: Sequence[Kept]) -> list[Kept]:
    """Return a row of each run."""
    return list({each.about["date"]: each for each in kept}.values())


@dataclass(frozen=True)
class _Panel:
    """The ratios of one model over all runs; x and y are the corner of the panel."""

    x: float
    y: float
    kept: Sequence[Kept]
    model: str
    field: str

    def draw(self, root: Element) -> None:
        group = SubElement(root, "g", {"transform": f"translate({self.x:.0f} {self.y:.0f})"})
        _text(group, LEFT, 20, f"{self.model}: {FIELDS[self.field]}", "panel")
        lines = self._lines()
        scale = _Scale.of([each for line in lines.values() for each in line.values()])
        for tick in scale.ticks:
            at = scale.y(tick)
            ends = {"x1": f"{LEFT}", "x2": f"{WIDTH / 2 - RIGHT:.0f}", "y1": f"{at:.1f}", "y2": f"{at:.1f}"}
            SubElement(group, "line", {"class": "one" if tick == 1 else "grid", **ends})
            _text(group, LEFT - 8, at + 4, f"{tick:g}", "quiet", "end")
        self._dates(group)
        names = _spread({peer: scale.y(list(line.values())[-1].median) for peer, line in lines.items()})
        for peer, line in lines.items():
            self._line(group, peer, line, scale, names[peer])

    def _lines(self) -> dict[str, dict[str, Ratio]]:
        """Return the ratios of each peer by the date of the run."""
        found: dict[str, dict[str, Ratio]] = {}
        for each in self.kept:
            ratio: Ratio | None = getattr(each.row, self.field)
            if each.row.model == self.model and ratio is not None:
                found.setdefault(each.row.peer, {})[each.about["date"]] = ratio
        return found

    def _at(self, date: str) -> float:
        """Return where a run stands; a single one in the middle."""
        dates = [each.about["date"] for each in _runs(self.kept)]
        share = dates.index(date) / (len(dates) - 1) if len(dates) > 1 else 0.5
        return LEFT + 20 + share * (WIDTH / 2 - LEFT - RIGHT - 40)

    def _dates(self, group: Element) -> None:
        runs = _runs(self.kept)
        step = math.ceil(len(runs) / LABELS)
        for each in runs[::-1][::step]:  # the last one always
            at = self._at(each.about["date"])
            _text(group, at, HEIGHT - BOTTOM + 22, each.about["date"][:10], "quiet", "middle")
            _text(group, at, HEIGHT - BOTTOM + 38, each.about["commit"], "quiet", "middle")

    def _line(self, group: Element, peer: str, line: dict[str, Ratio], scale: _Scale, named: float) -> None:
        """Draw the ratios of a peer, with its name behind the last one."""
        number = self._number(peer)
        own = SubElement(group, "g", {"class": f"peer{number}"})
        aside = BAR * (number - 2)  # so that the bars of a run stand beside each other
        points = [(self._at(date) + aside, scale.y(ratio.median)) for date, ratio in line.items()]
        SubElement(own, "polyline", {"class": "line", "points": " ".join(f"{x:.1f},{y:.1f}" for x, y in points)})
        for (x, y), (date, ratio) in zip(points, line.items(), strict=True):
            low, high = (f"{scale.y(end):.1f}" for end in (ratio.low, ratio.high))
            bar = {"x1": f"{x:.1f}", "x2": f"{x:.1f}", "y1": low, "y2": high}
            SubElement(own, "line", {"class": "line", **bar})
            dot = SubElement(own, "circle", {"class": "dot", "cx": f"{x:.1f}", "cy": f"{y:.1f}", "r": "4"})
            SubElement(dot, "title").text = f"{peer}, {date[:10]}: {ratio}"
        _text(own, WIDTH / 2 - RIGHT + 8, named + 4, peer, "name")

    def _number(self, peer: str) -> int:
        peers = list(dict.fromkeys(each.row.peer for each in self.kept))
        return peers.index(peer) % len(LIGHT)


@dataclass(frozen=True)
class _Scale:
    """A logarithmic axis of ratios, from low to high."""

    low: float
    high: float

    @classmethod
    def of(cls, ratios: Sequence[Ratio]) -> _Scale:
        """Return an axis that holds all middle halves, and 1, with a margin."""
        ends = [1.0, *(each.low for each in ratios), *(each.high for each in ratios)]
        return cls(min(ends) / 1.05, max(ends) * 1.05)

    def y(self, ratio: float) -> float:
        share = math.log(ratio / self.low) / math.log(self.high / self.low)
        return HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP)

    @property
    def ticks(self) -> list[float]:
        """Return the values beside which a number has room; 1 is one of them."""
        found = [1.0]
        for tick in sorted(TICKS, key=lambda each: abs(math.log(each))):
            if self.low <= tick <= self.high and min(abs(self.y(tick) - self.y(each)) for each in found) > 1.5 * APART:
                found.append(tick)
        return found


def _spread(wanted: dict[str, float]) -> dict[str, float]:
    """Return places for names that do not overlap, each as near as it can be below what is wanted."""
    found: dict[str, float] = {}
    free = -math.inf
    for name, place in sorted(wanted.items(), key=lambda each: each[1]):
        found[name] = max(place, free)
        free = found[name] + APART
    return found


def _text(parent: Element, x: float, y: float, text: str, kind: str, anchor: str = "start") -> None:
    facts = {"class": kind, "x": f"{x:.1f}", "y": f"{y:.1f}", "text-anchor": anchor}
    SubElement(parent, "text", facts).text = text
