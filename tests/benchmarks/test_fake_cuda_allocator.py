"""The arena, its spacers and failed recordings with torch's own allocator, which works on a described device."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from memgraph.graph.halves.direct_calls import DirectCode
from memgraph.runtime.arena import ArenaBlock, RequestLog, StepArena, _held_nbytes, _hold
from passes.simulate.spacers import Event, guide

pytestmark = pytest.mark.fake_cuda
CUDA = torch.device("cuda", 0)
MB = 1 << 20
FAILED = """
import torch, warnings
from memgraph.runtime.cuda_graphs import CudaRecorder
device = torch.device("cuda", 0)
before = torch.cuda.current_stream(device)
warnings.simplefilter("ignore")
try:
    CudaRecorder(device).record(torch.cuda.synchronize)  # which no capture allows
except RuntimeError:
    assert torch.cuda.current_stream(device) == before
    CudaRecorder.failed.clear()
    torch.empty(1, device=device)
    print("went on")
"""


@pytest.fixture(autouse=True)
def allocator(described: None) -> Iterator[None]:
    torch.cuda.init()  # torch asks for the history of no allocator before
    yield
    gc.collect()
    torch.cuda.empty_cache()


def block(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=CUDA)


def requests(seed: int) -> list[Event]:
    """Requests of some ops, and their ends."""
    draw, events, live = random.Random(seed), list[Event](), list[int]()
    count = draw.choice((4, 10, 30))
    for op in range(1, count + 1):
        for _ in range(draw.choice((1, 1, 2))):
            live.append(sum(event.nbytes > 0 for event in events))
            nbytes = draw.choice((draw.randrange(MB), draw.randrange(MB, 60 * MB), 8 * MB))
            events.append(Event(op, live[-1], -(-(nbytes + 1) // 512) * 512))
        while live and draw.random() < 0.55:
            events.append(Event(op, live.pop(draw.randrange(len(live))), 0))
    return events


@pytest.mark.parametrize("seed", range(20))
def test_the_allocator_does_what_was_simulated(seed: int) -> None:
    events = requests(seed)
    found, there = guide(events), dict[int, Tensor]()
    arena = ArenaBlock(found.block, CUDA)
    with arena.used():
        before = _held_nbytes(CUDA)
        for op, asked in groupby(events, lambda event: event.op):
            held = _hold(found.spacers, CUDA, op) if op in found.spacers else []
            for event in asked:
                if event.nbytes:
                    there[event.request] = block(event.nbytes)
                else:
                    del there[event.request]
            del held
        assert _held_nbytes(CUDA) - before == found.reserved - found.block


def test_requests_are_noted() -> None:
    log = RequestLog(CUDA)
    log.begin_half()
    a = block(8 * MB)
    log.note("a")
    b = block(12 * MB)
    del a
    log.note("b")
    found = log.end()
    assert found.events == [Event(1, 0, 8 * MB), Event(2, 1, 12 * MB), Event(2, 0, 0)]
    assert (found.live, found.why_not_placed) == (20 * MB, "") and b.nbytes == 12 * MB


def test_a_request_that_finds_no_memory_gets_what_is_free_in_a_block() -> None:
    torch.cuda.set_per_process_memory_fraction((300 * MB + 1) / torch.cuda.get_device_properties(CUDA).total_memory)
    try:
        arena = ArenaBlock(200 * MB, CUDA)
        with arena.used():
            results = [block(20 * MB)]
        arena.note(results)
        assert arena.is_held and arena.begin <= block(150 * MB).data_ptr() < arena.end
        results.clear()
        assert not arena.is_held
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def half(sizes: Sequence[int]) -> fx.GraphModule:
    """Allocate so many bytes, one after the other, and return the last."""
    graph = fx.Graph()
    options: dict[str, Any] = {"dtype": torch.uint8, "device": CUDA}
    made = [graph.call_function(torch.ops.aten.empty.memory_format, ([size],), options) for size in sizes]
    for value in made:
        graph.call_function(torch.ops.aten.view.default, (value, [-1]))
    graph.output((made[-1],))
    graph.set_codegen(DirectCode())
    return fx.GraphModule({}, graph)


def test_runs_on_two_streams_are_each_in_a_block_of_their_stream() -> None:
    halves: Any = SimpleNamespace(forward=half([8 * MB, 30 * MB, 700]), backward=half([12 * MB, 64 * MB, 5 * MB]))
    arena, side = StepArena(halves, CUDA, 1 << 30), torch.cuda.Stream(CUDA)
    for stream in (torch.cuda.current_stream(CUDA),) * 3 + (side,) * 2:
        with torch.cuda.stream(stream):
            run = arena.begin()
            assert run is not None
            results = [*run.run(halves.forward, []), *run.run(halves.backward, [])]
            run.end()
            assert arena.why_not == "" and (not run.is_ordinary or arena._block.is_held)  # type: ignore[union-attr]
            del results
    assert arena._block is not None and arena._block.stream == side


def test_a_process_goes_on_after_a_failed_recording() -> None:
    ran = subprocess.run([sys.executable, "-c", FAILED], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, "went on\n"), ran.stderr
