"""Time the ops of one flight, where they run: beside their neighbours and the copies.

    def forward(...):                            def forward(...):
        mm = op_aten_mm_default(x, w)        ->      mm = op_aten_mm_default(x, w);  note('mm')

The code is the step's own, so that values come and go as they do without.  On a GPU a note is an event on the compute
stream, and the host waits for the last one only: so it runs ahead as in any other step.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, fx

from ..storage.async_copy import CopyLog, copy_rates

LINE = re.compile(r"^    (\w+) = .*$", re.MULTILINE)


@dataclass(frozen=True)
class StepTimes:
    """What a flight took, in microseconds: each op by its name, and all of it; and the copies that were begun."""

    ops: dict[str, float]
    us: float
    moved: tuple[CopyLog, ...] = ()

    @cached_property
    def rates(self) -> tuple[float, float]:
        """Bytes per microsecond on the links out and back, 0.0 where nothing was copied."""
        return copy_rates(*self.moved)

    def without(self, waited: Mapping[str, float]) -> StepTimes:
        """The same but for what ops have waited for the far tier, in microseconds."""
        return replace(self, ops={name: us - waited.get(name, 0.0) for name, us in self.ops.items()})

    def beside(self, moved: CopyLog) -> StepTimes:
        """The same with other copies of the step, as those of its update."""
        return replace(self, moved=(*self.moved, moved))


class WallTimes:
    """Times whole halves of a step: `with wall: ...` for each of them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.spans: list[tuple[Any, Any]] = []

    def __enter__(self) -> None:
        self.begin = now(self.device)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.spans.append((self.begin, now(self.device)))

    @cached_property
    def us(self) -> float:
        """The microseconds of all halves so far; on a GPU this waits for the last of them."""
        return sum(between_us(begin, end) for begin, end in self.spans)


def now(device: torch.device) -> Any:
    """This moment: seconds of a CPU, an event of a GPU."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def between_us(begin: Any, end: Any) -> float:
    """The microseconds between two moments of one device."""
    if isinstance(begin, float):
        return (end - begin) * 1e6
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


class Clock:
    """Runs the halves of a step, and notes when each op has ended."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.ops: defaultdict[str, float] = defaultdict(float)
        self.us = 0.0

    def run(self, half: fx.GraphModule, values: list[Tensor]) -> Any:
        """What the half makes of `values`."""
        forward = timing_ops(half, self._note)
        self.notes = [("", now(self.device))]
        results = forward(half, values)
        last = now(self.device)
        self.us += between_us(self.notes[0][1], last)
        for (_, begin), (name, end) in pairwise(self.notes):
            self.ops[name] += between_us(begin, end)  # backward takes what forward has saved by the same names
        return results

    def _note(self, name: str) -> None:
        self.notes.append((name, now(self.device)))


def timing_ops(half: fx.GraphModule, note: Callable[[str], None]) -> Any:
    """The half's code, which tells `note` the name of every op behind it, when what it read last has gone."""
    code = half.graph.python_code("self")
    known = {**code.globals, "memgraph_note": note}
    exec(LINE.sub(r"\g<0>;  memgraph_note('\1')", code.src), known)
    return known["forward"]
