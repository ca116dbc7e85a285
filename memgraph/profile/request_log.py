"""Note the requests of a step's ops to torch's CUDA allocator, in order.

    log.begin_half(); run the half, with log.note(name) behind each op
    log.end()   ->   Event(op 1, request 0, 4194304 bytes), Event(op 2, request 0, 0 bytes: freed), ...

The allocator keeps a history of its own. A mark in it, behind each op, is a block on a stream where nothing else is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple

import torch

from passes.simulate.arena import ALIGNMENT
from passes.simulate.spacers import Event

ENTRIES = 10_000_000  # of the history, more than a step has


class Requests(NamedTuple):
    """The requests of a run.

    Attributes:
        events: those of the ops, by the number of the op. What is requested between halves is left out.
        ops: the half and the name of each op; what is between halves has no name.
        live: the most bytes that they had at once.
        why_not_placed: why the allocator gives out other blocks than the best fit; empty if it does not.
    """

    events: list[Event]
    ops: list[tuple[int, str]]
    live: int
    why_not_placed: str


def why_not_logged(device: torch.device) -> str:
    """Return why requests can't be noted; empty if they can, or once the run that is noted has ended."""
    if torch.cuda.get_allocator_backend() != "native":
        return f"the allocator is {torch.cuda.get_allocator_backend()}, and not torch's own"
    if torch._C._cuda_isHistoryEnabled() and not RequestLog.is_open:
        return "the history of torch's allocator is being recorded"
    return ""


class RequestLog:
    """The requests of one run on a device, on its current stream. The allocator has one history: one log at a time."""

    is_open: ClassVar[bool] = False

    def __init__(self, device: torch.device) -> None:
        self.device, self._ops, self._half = device, list[tuple[int, str]](), -1
        self._stream = torch.cuda.current_stream(device).cuda_stream
        torch.cuda.memory._record_memory_history("all", context=None, max_entries=ENTRIES)
        RequestLog.is_open = True

    def begin_half(self) -> None:
        """Mark the beginning of a half."""
        self._half += 1
        self.note("")

    def note(self, name: str) -> None:
        """Mark the end of an op."""
        self._ops.append((self._half, name))
        with torch.cuda.stream(_mark_stream(self.device)):
            torch.empty(1, dtype=torch.uint8, device=self.device)

    def end(self) -> Requests:
        """Stop the history, and return the requests."""
        try:
            snapshot: Any = torch.cuda.memory._snapshot(self.device)
        finally:
            torch.cuda.memory._record_memory_history(None)
            RequestLog.is_open = False
        events = self._events(snapshot["device_traces"][self.device.index or 0])
        return Requests(events, self._ops, _most(events), why_not_placed(snapshot["allocator_settings"]))

    def _events(self, history: Sequence[dict[str, Any]]) -> list[Event]:
        mark = _mark_stream(self.device).cuda_stream
        found, live, op = list[Event](), dict[int, int](), 0
        for entry in history:
            if entry["action"] == "alloc" and entry["stream"] == mark:
                op += 1
            elif op == len(self._ops):
                break  # behind the last half
            elif entry["action"] == "alloc" and entry["stream"] == self._stream and self._ops[op][1]:
                live[entry["addr"]] = len(found)
                found.append(Event(op, len(found), -(-max(entry["size"], 1) // ALIGNMENT) * ALIGNMENT))
            elif entry["action"] == "free_completed" and entry["addr"] in live:
                found.append(Event(op, live.pop(entry["addr"]), 0))
        return found


def why_not_placed(settings: Mapping[str, Any]) -> str:
    """Return why an allocator with these settings does not give out the best fit of one large block."""
    if settings["expandable_segments"]:
        return "segments are expandable, and torch can't free a pool of these"
    if settings["max_split_size"] >= 0:
        return "max_split_size_mb is set, and torch does not divide a larger block"
    if any(settings["roundup_power2_divisions"].values()):
        return "roundup_power2_divisions is set, and blocks are larger than what is asked for"
    return ""


def _most(events: Sequence[Event]) -> int:
    """Return the most bytes that requests have at once."""
    nbytes = {event.request: event.nbytes for event in events if event.nbytes}
    return max(accumulate((event.nbytes or -nbytes[event.request] for event in events), initial=0))


@cache
def _mark_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
