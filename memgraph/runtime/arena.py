"""Run a step of a GPU in one block of memory, where each value has its address from an arena.

    a run is noted     the requests of its ops, and so the spacers that bring them to their addresses
    later runs              mm = op_aten_mm_default(x, w);  x = None
                       ->   memgraph_held = memgraph_hold(3)
                            mm = op_aten_mm_default(x, w);  x = None;  memgraph_held = None

The block is a pool of torch's allocator, so a request that was not noted gets memory as ever. If the pool has to grow,
the step leaves its arena. A run that begins while results of the last one are held takes place outside, and the block
goes back to the device when these are freed.

See passes/simulate/spacers.py.

Note the requests of a step's ops to torch's CUDA allocator, in order.

    log.begin_half(); run the half, with log.note(name) behind each op
    log.end()   ->   Event(op 1, request 0, 4194304 bytes), Event(op 2, request 0, 0 bytes: freed), ...

The allocator keeps a history of its own. A mark in it, behind each op, is a block on a stream where nothing else is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, fx
from torch.multiprocessing.reductions import StorageWeakRef

from passes.simulate.arena import ALIGNMENT
from passes.simulate.spacers import Event, Guide, Spacer, guide

from ..graph.halves.edited_code import run_edited
from ..graph.halves.partition import Partition
from ..profile.step_timer import timing_ops

MOST_HELD = 3  # runs that begin while results of an earlier one are held in its block
MOST_NOTED = 3  # runs that are noted in vain, since they had other halves or did not come to their end
COLLECTIVES = "collectives free memory when other ranks are done"
_log = logging.getLogger(__name__)
Code = Callable[[fx.GraphModule, list[Any]], Iterable[Any]]
ENTRIES = 10_000_000  # of the history, more than a step has


class StepArena:
    """The arena of one step: a run is noted, and the next ones take place in it.

    Attributes:
        why_not: why the step is not in its arena; empty while it is, or may come to be.
        taken: the most bytes that all blocks of the device had, and that the allocator held, in the first run inside.
    """

    def __init__(self, halves: Partition, device: torch.device, budget: int, has_collectives: bool = False) -> None:
        self.halves = [half for half in (halves.forward, halves.backward) if half is not None]
        self.device, self.budget = device, budget
        self.why_not = COLLECTIVES if has_collectives else why_not_logged(device)
        self.taken: tuple[int, int] | None = None
        self._guide: Guide | None = None
        self._code: dict[fx.GraphModule, Code] = {}
        self._block: ArenaBlock | None = None
        self._given_up: list[ArenaBlock] = []  # kept while results are in them: runs that find no memory use the rest
        self._held_runs = self._noted_in_vain = 0
        self._is_busy = False
        self._grown = 0  # bytes that the pool has beside its block

    def begin(self) -> NotedRun | RunInArena | None:
        """Return the run that is noted, or one in the arena; None for one outside."""
        self._close_emptied()
        if self.why_not or self._is_busy or torch.cuda.is_current_stream_capturing():
            return None
        if self._given_up:
            self._count_held()
            return None
        if self._guide is None:
            return self._noted_run()
        block = self._empty_block(self._guide.block)
        if block is None:
            return None
        self._is_busy = True
        return RunInArena(self, block, self._code)

    def end(self) -> None:
        """Give the block back to the device, which needs it for what runs outside."""
        self._close_emptied()
        if not self._is_busy and self._give_up():
            self._count_held()

    def close_noted(self, requests: Requests | None, allocated: int) -> None:
        """End the run that was noted, before which so many bytes were allocated.

        `requests` are None if the run had other halves, or did not come to its end.
        """
        self._is_busy = False
        if requests is None:
            self._noted_in_vain += 1
            if self._noted_in_vain == MOST_NOTED:
                self._leave("its runs have other halves than planned, or no backward")
            return
        if requests.why_not_placed:
            self._leave(requests.why_not_placed)
            return
        _log.info("addresses are found for %d requests", len(requests.events) // 2)
        self._guide = found = guide(requests.events, limit=max(self.budget - allocated, requests.live))
        hold = partial(_hold, found.spacers, self.device)
        for i, half in enumerate(self.halves):
            places = {requests.ops[op][1]: op for op in found.spacers if requests.ops[op][0] == i}
            self._code[half] = run_edited(half, partial(_with_spacers, places), memgraph_hold=hold)

    def close_run(self, grown: int) -> None:
        """End a run in the arena, in which the pool has grown by so many bytes."""
        assert self._guide is not None
        self._is_busy = False
        self._grown += grown
        if self._grown > self._guide.reserved - self._guide.block:
            self._leave("a run asked for other memory than the one that was noted")

    def _noted_run(self) -> NotedRun | None:
        """Return a run that is noted; None while that of another step is, or if the caller records the history."""
        self.why_not = why_not_logged(self.device)
        if self.why_not or RequestLog.is_open:
            return None
        self._is_busy = True
        return NotedRun(self)

    def _empty_block(self, nbytes: int) -> ArenaBlock | None:
        """Return the block, if nothing is in it."""
        if self._block is not None and self._block.is_held:
            self.end()
            return None
        if self._block is not None and self._block.stream != torch.cuda.current_stream(self.device):
            self._block = None  # the allocator keeps what was freed on a stream for requests of that stream
        if self._block is None:
            torch.cuda.empty_cache()  # of what runs outside have left
            self._grown = 0
            try:
                self._block = ArenaBlock(nbytes, self.device)
            except torch.OutOfMemoryError:
                self._leave(f"the device has no block of {nbytes} bytes")
        return self._block

    def _close_emptied(self) -> None:
        """Close the blocks that were given up and whose results are gone. Not yet run on a GPU."""
        self._given_up = [block for block in self._given_up if block.is_held]

    def _count_held(self) -> None:
        self._held_runs += 1
        if self._held_runs == MOST_HELD:
            self._leave("gradients or outputs of a run are held when another one begins")

    def _leave(self, why: str) -> None:
        self.why_not = why
        self._give_up()
        self._code.clear()

    def _give_up(self) -> bool:
        """Give up the block; return True if results are in it."""
        block, self._block = self._block, None
        if block is None or not block.is_held:
            return False
        self._given_up.append(block)
        return True


class ArenaBlock:
    """A pool of torch's allocator with one free block."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.current_stream(device)
        with torch.cuda.device(device):  # a pool belongs to the current one
            self.pool = torch.cuda.MemPool(use_on_oom=True)
        with self.used():
            block = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.begin, self.end = block.data_ptr(), block.data_ptr() + nbytes
        self.results: list[StorageWeakRef] = []

    def used(self) -> Any:
        """Allocate from the block."""
        return torch.cuda.use_mem_pool(self.pool, self.device)

    @property
    def is_held(self) -> bool:
        """True if results of the last run are still there."""
        return not all(result.expired() for result in self.results)

    def note(self, results: Iterable[Any]) -> None:
        """Note the results of a half that are in the block."""
        storages = (result.untyped_storage() for result in results if isinstance(result, Tensor))
        self.results += [StorageWeakRef(each) for each in storages if self.begin <= each.data_ptr() < self.end]


class NotedRun:
    """A run whose requests are noted."""

    is_ordinary = False

    def __init__(self, arena: StepArena) -> None:
        self.arena, self.ran = arena, list[fx.GraphModule]()
        self.allocated = torch.cuda.memory_allocated(arena.device)
        self.log = RequestLog(arena.device)

    def run(self, half: fx.GraphModule, values: list[Any]) -> Iterable[Any]:
        """Run a half."""
        self.ran.append(half)
        self.log.begin_half()
        return timing_ops(half, self.log.note)(half, values)

    def end(self) -> None:
        """End the run."""
        requests = self.log.end()
        self.arena.close_noted(requests if self.ran == self.arena.halves else None, self.allocated)


class RunInArena:
    """A run in the block."""

    is_ordinary = True

    def __init__(self, arena: StepArena, block: ArenaBlock, code: Mapping[fx.GraphModule, Code]) -> None:
        self.arena, self.block, self.code = arena, block, code
        self.grown = 0
        block.results = []
        if arena.taken is None:
            torch.cuda.reset_peak_memory_stats(block.device)

    def run(self, half: fx.GraphModule, values: list[Any]) -> Iterable[Any]:
        """Run a half; one that was not noted runs outside."""
        if half not in self.code:
            return half.forward(values)
        with self.block.used():
            before = _held_nbytes(self.block.device)
            results = tuple(self.code[half](half, values))
            self.grown += _held_nbytes(self.block.device) - before
        self.block.note(results)
        return results

    def end(self) -> None:
        """End the run; the first one has the bytes for the report."""
        if self.arena.taken is None:
            stats = torch.cuda.memory_stats(self.block.device)
            self.arena.taken = stats["allocated_bytes.all.peak"], stats["reserved_bytes.all.peak"]
        self.arena.close_run(self.grown)


def _with_spacers(ops: Mapping[str, int], name: str, line: str) -> str:
    """Hold the spacers of an op while it runs."""
    return f"    memgraph_held = memgraph_hold({ops[name]})\n{line};  memgraph_held = None" if name in ops else line


def _hold(spacers: Mapping[int, Sequence[Spacer]], device: torch.device, op: int) -> list[Tensor]:
    """Allocate the spacers of an op, and return those that are kept until it has run."""
    held = [(torch.empty(spacer.nbytes, dtype=torch.uint8, device=device), spacer.kept) for spacer in spacers[op]]
    return [block for block, kept in held if kept]


def _held_nbytes(device: torch.device) -> int:
    """Return the bytes of all segments for large requests."""
    return int(torch.cuda.memory_stats_as_nested_dict(device)["reserved_bytes"]["large_pool"]["current"])


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
