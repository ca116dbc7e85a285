"""Compare memgraph with eager and torch's own ways to save memory, in one run in turn, and keep the result.

    python -m benchmarks.peers [--model gpt] [--peer checkpoint] [--rounds 9] [--threads 1]
    python -m benchmarks.peers --plot      # draw what is kept, and run nothing

Each way has a process of its own, as a plan changes the allocator of its process, and all of a model step in turn.
memgraph's budget is the measured peak of the way beside it, and it compiles ops where that way does.  Peaks are of the
whole process, counted by tests/support/allocator_meter.py in a process of their own; steps are timed without it.  The
high water of anonymous memory of those processes is read from the system, above what is left without the model.  Rows
are added to the history of this machine in results/peers, and changes since the latest earlier run are printed:
docs/figures-peers.md says how to read them.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import typer
from rich.console import Console

from benchmarks.clock import Step, in_turn, middle
from benchmarks.contenders import Way
from benchmarks.records import surroundings
from benchmarks.sides import Side
from tests.support.allocator_meter import preloaded
from tests.support.high_water import HighWater

from .history import History, changes
from .models import MODELS, Model
from .plot import svg
from .row import Ratio, Row, table
from .steps import WAYS, Foretold, PeerStep, Taken

OURS = "memgraph at "  # followed by the way whose peak is the budget


def main(
    model: Annotated[list[str] | None, typer.Option(help=f"of {', '.join(MODELS)}; all of them by default")] = None,
    peer: Annotated[list[str] | None, typer.Option(help="eager runs always; all of them by default")] = None,
    rounds: Annotated[int, typer.Option(min=3, help="How often each step is timed.")] = 9,
    threads: Annotated[int, typer.Option(min=1, help="Of torch; one is steadier where cores are shared.")] = 1,
    plot: Annotated[bool, typer.Option("--plot", help="Draw the history of this machine, and run nothing.")] = False,
) -> None:
    """Run all peers, print a table and what changed, and add the rows to the history of this machine."""
    history = History({**surroundings("peers"), "setting": f"fp32, threads: {threads}"})
    if not plot:
        ways = [way for way in WAYS if not peer or way.name in ("eager", *peer)]
        rows = [row for name in model or MODELS for row in beside(name, MODELS[name], ways, rounds, threads)]
        facts = history.about
        title = f"{facts['setting']}; {facts['machine']}, torch {facts['torch']}, load {facts['load']}"
        Console(width=210).print(table(rows, title))
        history.append(rows)
        print("\n".join(changes(history.read())))
    drawing = history.path.with_suffix(".svg")
    drawing.write_text(svg(history.read()))
    print(f"rows are in {history.path}, a plot in {drawing}")


def beside(name: str, model: Model, ways: Sequence[Way], rounds: int, threads: int) -> list[Row]:
    """Run all ways on a model, and memgraph beside each, in turn; eager is the first."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        steps = Steps(name, stack, preloaded(Path(folder)))
        for way in ways:
            peak = steps.begin(way.name, model, way, threads)
            if isinstance(peak, int):
                steps.begin(OURS + way.name, model, way, threads, peak)
        steps.seconds = in_turn(steps.steps, rounds)
        steps.end()
    return [steps.row(way.name) for way in ways]


class Steps:
    """The processes of one model, each with a step: their peak bytes, or why there are none, and what they took."""

    def __init__(self, model: str, stack: ExitStack, counting: Mapping[str, str]) -> None:
        self.model, self.stack, self.counting = model, stack, counting
        self.sides: dict[str, Side] = {}
        self.waters: dict[str, HighWater] = {}
        self.peaks: dict[str, int] = {}
        self.whys: dict[str, str] = {}
        self.steps: dict[str, Step] = {}
        self.seconds: dict[str, list[float]] = {}
        self.taken: dict[str, list[Taken]] = {}
        self.anonymous: dict[str, int] = {}
        self.forecasts: dict[str, Foretold] = {}

    def begin(self, name: str, *given: Any) -> int | str:
        """Start the process of a step; return its peak bytes, or why it does not run.

        They are counted in another process, whose allocations take longer and where memgraph has no pool of pages.
        """
        with patch.dict(os.environ, self.counting), Side(PeerStep, *given) as counted:
            ready: int | str = counted.do("ready")
        print(f"{self.model} {name}: {ready}", file=sys.stderr, flush=True)
        if isinstance(ready, int):
            side = self.sides[name] = self.stack.enter_context(Side(PeerStep, *given))
            self.waters[name] = HighWater(side.process)
            side.do("ready")
            self.waters[name].reset()
            self.peaks[name], self.steps[name], self.taken[name] = ready, partial(self._run, name), []
        else:
            self.whys[name] = ready
        return ready

    def _run(self, name: str) -> None:
        self.taken[name].append(self.sides[name].do("run"))

    def end(self) -> None:
        """Read the forecasts, and the bytes that are left without the models."""
        for name, side in self.sides.items():
            if name.startswith(OURS):
                self.forecasts[name] = side.do("forecast")
            most = self.waters[name].anonymous_nbytes
            side.do("end")
            self.waters[name].reset()
            self.anonymous[name] = most - self.waters[name].anonymous_nbytes

    def row(self, peer: str) -> Row:
        """Return the row of a peer: its bytes, and ratios of its seconds and memgraph's."""
        ours = OURS + peer
        is_eager = peer == "eager"
        told = self.forecasts.get(ours)
        nbytes, alone_ms, ms, repriced_ms = astuple(told) if told else (None,) * 4
        return Row(
            self.model, peer, self.peaks["eager"], self.peaks.get(peer), self._ms(peer),
            None if is_eager else self._ratio(peer, "eager"), self.peaks.get(ours), self._ratio(ours, peer),
            None if is_eager else self._ratio(ours, "eager"),
            self.whys.get(peer) or self.whys.get(ours, ""), self.anonymous.get(peer), self.anonymous.get(ours),
            nbytes, alone_ms, ms, self._cpu(ours, peer), self._faults(peer), self._faults(ours), repriced_ms,
        )  # fmt: skip

    def _ms(self, name: str) -> float | None:
        return round(1e3 * middle(self.seconds[name])[1], 1) if name in self.seconds else None

    def _ratio(self, one: str, other: str) -> Ratio | None:
        both = one in self.seconds and other in self.seconds
        return Ratio.of(self.seconds[one], self.seconds[other]) if both else None

    def _cpu(self, one: str, other: str) -> Ratio | None:
        if one not in self.taken or other not in self.taken:
            return None
        ours, theirs = ([step.cpu_s for step in self.taken[name]] for name in (one, other))
        return Ratio.of(ours, theirs)

    def _faults(self, name: str) -> int | None:
        return int(middle([step.faults for step in self.taken[name]])[1]) if name in self.taken else None


if __name__ == "__main__":
    typer.run(main)
