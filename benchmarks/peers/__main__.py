"""Compare memgraph with eager and torch's own ways to save memory, in one run in turn, and keep the result.

    python -m benchmarks.peers [--model gpt] [--rounds 9] [--threads 1]
    python -m benchmarks.peers --plot      # draw what is kept, and run nothing

Each way has a process of its own, as a plan changes the allocator of its process, and all of a model step in turn.
memgraph's budget is the measured peak of the way beside it, and it compiles ops where that way does.  Peaks are of the
whole process, counted by tests/support/allocator_meter.py in a process of their own; steps are timed without it, and
the anonymous memory of those processes is read from the system.  Rows are added to the history of this machine in
results/peers, and changes since the latest earlier run are printed: docs/figures-peers.md says how to read them.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import typer
from rich.console import Console

from benchmarks.clock import Step, in_turn, middle
from benchmarks.contenders import Way
from benchmarks.nets import Size
from benchmarks.records import surroundings
from benchmarks.rivals import BATCH, SIZES
from benchmarks.sides import Side
from tests.support.allocator_meter import preloaded
from tests.support.planning_memory import anonymous_nbytes

from .history import History, changes
from .plot import svg
from .row import Ratio, Row, table
from .steps import WAYS, PeerStep

OURS = "memgraph at "  # followed by the way whose peak is the budget


def main(
    model: Annotated[list[str] | None, typer.Option(help=f"of {', '.join(SIZES)}; all of them by default")] = None,
    rounds: Annotated[int, typer.Option(min=3, help="How often each step is timed.")] = 9,
    threads: Annotated[int, typer.Option(min=1, help="Of torch; one is steadier where cores are shared.")] = 1,
    plot: Annotated[bool, typer.Option("--plot", help="Draw the history of this machine, and run nothing.")] = False,
) -> None:
    """Run all peers, print a table and what changed, and add the rows to the history of this machine."""
    history = History(about(threads))
    if not plot:
        rows = [row for name in model or SIZES for row in beside(name, SIZES[name], WAYS, rounds, threads)]
        facts = history.about
        title = f"{facts['setting']}; {facts['machine']}, torch {facts['torch']}, load {facts['load']}"
        Console(width=150).print(table(rows, title))
        history.append(rows)
        print("\n".join(changes(history.read())))
    drawing = history.path.with_suffix(".svg")
    drawing.write_text(svg(history.read()))
    print(f"rows are in {history.path}, a plot in {drawing}")


def about(threads: int) -> dict[str, Any]:
    """Describe the run before it begins, while the load is that of others."""
    size = next(iter(SIZES.values()))
    model = f"{size.layers} layers of width {size.width}, {BATCH} x {size.context} tokens, fp32"
    return {**surroundings("peers"), "setting": f"{model}, threads: {threads}"}


def beside(model: str, size: Size, ways: Sequence[Way], rounds: int, threads: int) -> list[Row]:
    """Run all ways on a model, and memgraph beside each, in turn; eager is the first."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        steps = Steps(model, stack, preloaded(Path(folder)))
        for way in ways:
            peak = steps.begin(way.name, size, way, threads)
            if isinstance(peak, int):
                steps.begin(OURS + way.name, size, way, threads, peak)
        steps.seconds = in_turn(steps.steps, rounds)
    return [steps.row(way.name) for way in ways]


class Steps:
    """The processes of one model, each with a step: the peak bytes of all, or why there are none, and their seconds."""

    def __init__(self, model: str, stack: ExitStack, counting: Mapping[str, str]) -> None:
        self.model, self.stack, self.counting = model, stack, counting
        self.anonymous: dict[str, int] = {}
        self.peaks: dict[str, int] = {}
        self.whys: dict[str, str] = {}
        self.steps: dict[str, Step] = {}
        self.seconds: dict[str, list[float]] = {}

    def begin(self, name: str, *given: Any) -> int | str:
        """Start the process of a step; return its peak bytes, or why it does not run.

        They are counted in another process, whose allocations take longer and where memgraph has no pool of pages.
        """
        with patch.dict(os.environ, self.counting), Side(PeerStep, *given) as counted:
            ready: int | str = counted.do("ready")
        print(f"{self.model} {name}: {ready}", file=sys.stderr, flush=True)
        if isinstance(ready, int):
            side = self.stack.enter_context(Side(PeerStep, *given))
            self.peaks[name], self.steps[name] = ready, partial(self._run, name, side, side.do("ready"))
        else:
            self.whys[name] = ready
        return ready

    def _run(self, name: str, side: Side, before: int) -> None:
        side.do("run")
        self.anonymous[name] = max(self.anonymous.get(name, 0), anonymous_nbytes(side.process) - before)

    def row(self, peer: str) -> Row:
        """Return the row of a peer: its bytes, and ratios of its seconds and memgraph's."""
        ours = OURS + peer
        is_eager = peer == "eager"
        return Row(
            self.model, peer, self.peaks["eager"], self.peaks.get(peer), self._ms(peer),
            None if is_eager else self._ratio(peer, "eager"), self.peaks.get(ours), self._ratio(ours, peer),
            None if is_eager else self._ratio(ours, "eager"),
            self.whys.get(peer) or self.whys.get(ours, ""), self.anonymous.get(peer), self.anonymous.get(ours),
        )  # fmt: skip

    def _ms(self, name: str) -> float | None:
        return round(1e3 * middle(self.seconds[name])[1], 1) if name in self.seconds else None

    def _ratio(self, one: str, other: str) -> Ratio | None:
        both = one in self.seconds and other in self.seconds
        return Ratio.of(self.seconds[one], self.seconds[other]) if both else None


if __name__ == "__main__":
    typer.run(main)
