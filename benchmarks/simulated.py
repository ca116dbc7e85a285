"""Part A: plan large steps that are priced by a roofline and never run, each in its own process.

gpt12  40%  12.82 %, at least 12.46 %, gap 0.32 %, 0.2 s, 110 MB
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

PLAIN = ("gpt12", "gpt24", "xl", "llama16", "llama32", "unet", "resnet50", "vit", "t5")
EVERY = (*PLAIN, *(f"{name}-d" for name in PLAIN), "gpt96-d")
LINKED = ("gpt12", "gpt24", "unet", "gpt12-d")  # planned with a tier as well
SHARES = (0.8, 0.6, 0.4, 0.3)
LINK = 22_000.0  # bytes per microsecond each way
GOAL_GAP, GOAL_HARDEST = 0.5, 2.0  # percent of the step; of the decomposed U-Net at 30 %
GOAL_SECONDS = ((2_000, 1.0), (6_000, 5.0), (20_000, 20.0))  # up to so many nodes; larger steps have the last limit
GOAL_RSS = 2e9
COLUMNS = ("graph", "nodes", "link", "budget", "overhead %", "bound %", "gap %", "plan s", "goal s", "RSS MB", "")


@dataclass(frozen=True)
class Row:
    """The results of `one_plan` for a graph and a budget."""

    graph: str
    share: float
    link: float
    found: dict[str, Any]

    @property
    def missed(self) -> list[str]:
        """The goals that are missed."""
        checks = {
            "gap": self.found["gap"] is not None and self.found["gap"] > self.goal_gap,
            "time": self.found["seconds"] > self.goal_seconds,
            "memory": self.found["rss"] > GOAL_RSS,
            "no plan, no proof": self.found["outcome"] in ("none", "single"),
        }
        return [what for what, short in checks.items() if short]

    @property
    def goal_gap(self) -> float:
        return GOAL_HARDEST if (self.graph, self.share) == ("unet-d", 0.3) else GOAL_GAP

    @property
    def goal_seconds(self) -> float:
        return next((s for nodes, s in GOAL_SECONDS if self.found["nodes"] <= nodes), GOAL_SECONDS[-1][1])

    @property
    def said(self) -> str:
        """The text of the last column."""
        least = f" below {self.found['least'] / self.found['keep_bytes']:.1%}" if self.found["least"] else ""
        words = {"fits": "", "floor": "proven: none" + least, "proven": "proven by the LP: none"}
        words |= {"single": f"single: proven none; best found{least.replace('below', 'at')}"}
        words |= {"none": f"no plan; best found{least.replace('below', 'at')}"}
        twice = "runs values twice or early" if self.found["single"] is False else ""
        return "; ".join(filter(None, (words[self.found["outcome"]], twice, *("MISSED " + it for it in self.missed))))


def simulated(names: list[str] | None, folder: Path | None) -> list[Row]:
    """Plan every budget of every graph, one process at a time; `folder` keeps the traces for the next run."""
    with tempfile.TemporaryDirectory() as temporary:
        kept = folder or Path(temporary)
        return [row for name in EVERY if not names or name in names for row in _graph(name, kept)]


def _graph(name: str, folder: Path) -> list[Row]:
    file = trace_file(name, folder)
    rows = []
    for link in (0.0, LINK) if name in LINKED else (0.0,):
        for share in SHARES:
            found = json.loads(run("benchmarks.one_plan", str(file), str(share), str(link)))
            rows.append(Row(name, share, link, found))
            print(name, share, rows[-1].said or "fits", f"{found['seconds']:.1f} s", file=sys.stderr, flush=True)
    return rows


def trace_file(name: str, folder: Path) -> Path:
    """Return the file of a graph's trace; write it if it does not exist."""
    file = folder / f"{name}.txt"
    if not file.is_file():
        run("benchmarks.graphs", name, str(file))
    return file


def run(module: str, *arguments: str) -> str:
    """Run a module, and return its last line; its warnings are dropped."""
    command = [sys.executable, "-W", "ignore", "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} exited with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout.strip().splitlines()[-1]


def table(rows: list[Row]) -> Table:
    title = "simulated; overhead, bound and gap in % of the step; budgets in % of what the step holds above its inputs"
    shown = Table(*COLUMNS, title=title, title_justify="left", box=None)
    for row in rows:
        found = row.found
        shown.add_row(
            row.graph,
            str(found["nodes"]),
            f"{row.link / 1e3:.0f} GB/s" if row.link else "",
            f"{row.share:.0%}",
            *("" if found[key] is None else f"{found[key]:.2f}" for key in ("overhead", "bound", "gap")),
            f"{found['seconds']:.2f}",
            f"{row.goal_seconds:.0f}",
            f"{found['rss'] / 1e6:.0f}",
            row.said,
        )
    return shown


def verdict(rows: list[Row]) -> list[str]:
    """Count the rows that reach each goal."""
    planned = [row for row in rows if row.found["outcome"] == "fits"]
    gaps = [row for row in planned if "gap" not in row.missed]
    quick = [row for row in rows if "time" not in row.missed]
    proven = [row for row in rows if row.found["outcome"] in ("floor", "proven")]
    rss = max((row.found["rss"] for row in rows), default=0) / 1e6
    return [
        f"{len(planned)} of {len(rows)} planned, {len(proven)} proven infeasible, "
        f"{len(rows) - len(planned) - len(proven)} neither",
        f"gap <= {GOAL_GAP} % (unet-d at 30 %: {GOAL_HARDEST} %): {len(gaps)} of {len(planned)}",
        f"plan time within its goal: {len(quick)} of {len(rows)}",
        f"largest peak RSS {rss:.0f} MB (goal {GOAL_RSS / 1e6:.0f} MB)",
    ]
