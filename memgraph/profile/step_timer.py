"""Time each op in a run of the step, with its real neighbours and copies.

    def forward(...):                            def forward(...):
        mm = op_aten_mm_default(x, w)        ->      mm = op_aten_mm_default(x, w);  note('mm')

The code is the step's own, so values have the same lifetimes. On a GPU, a note is an event on the compute stream. The
host waits for the last one only, and runs ahead as in any other step.
"""

from __future__ import annotations

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

from ..graph.halves.edited_code import run_edited
from ..storage.async_copy import CopyLog, copy_rates
from ..storage.io_threads import moves_in


@dataclass(frozen=True)
class StepTimes:
    """The microseconds of each op by name, and of the whole run; and the logs of its copies."""

    ops: dict[str, float]
    us: float
    copies: tuple[CopyLog, ...] = ()

    def rates(self, half_duplex: bool, in_memory: bool = False) -> tuple[float, float]:
        """Return bytes per microsecond of offloads and reloads, to files in memory or else; 0.0 without a copy."""
        return copy_rates(*self.copies, half_duplex=half_duplex, moves=moves_in(in_memory))

    def without(self, waited: Mapping[str, float]) -> StepTimes:
        """Subtract the microseconds that ops waited for the tier; on a GPU, the host's waits overlap the op."""
        return replace(self, ops={name: max(0.0, us - waited.get(name, 0.0)) for name, us in self.ops.items()})

    def beside(self, copies: CopyLog) -> StepTimes:
        """Add other copies of the step, such as those of its update."""
        return replace(self, copies=(*self.copies, copies))


class WallTimes:
    """Times the halves of a step, each in `with wall: ...`."""

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
        """Return the microseconds of all halves so far; on a GPU this waits for the last one."""
        return sum(between_us(begin, end) for begin, end in self.spans)


def now(device: torch.device) -> Any:
    """Return the time in seconds on a CPU, or an event on a GPU."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def between_us(begin: Any, end: Any) -> float:
    """Return the microseconds between two results of `now`."""
    if isinstance(begin, float):
        return (end - begin) * 1e6
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


class Clock:
    """Runs the halves of a step, and records when each op ends."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.ops: defaultdict[str, float] = defaultdict(float)
        self.us = 0.0

    def run(self, half: fx.GraphModule, values: list[Tensor]) -> Any:
        """Run a half on `values`, and return its results."""
        forward = timing_ops(half, self._note)
        self.notes = [("", now(self.device))]
        results = forward(half, values)
        last = now(self.device)
        self.us += between_us(self.notes[0][1], last)
        for (_, begin), (name, end) in pairwise(self.notes):
            self.ops[name] += between_us(begin, end)  # backward reads saved values by the same names
        return results

    def _note(self, name: str) -> None:
        self.notes.append((name, now(self.device)))


def timing_ops(half: fx.GraphModule, note: Callable[[str], None]) -> Any:
    """Compile the half's code with a call of `note` after each op, when its dead operands are freed."""
    return run_edited(half, lambda name, line: f"{line};  memgraph_note('{name}')", memgraph_note=note)
