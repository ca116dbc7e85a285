"""Ops of a GPU are priced with operands that no cache holds, by a buffer that no budget pays for; on a simulated one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from memgraph.graph.summarize import Cost
from memgraph.profile import op_cost, op_profiler
from memgraph.profile.memory_meter import Allocation
from memgraph.profile.op_profiler import FLUSHED, LARGE, RUNS, OpProfiler, cold_us

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
CACHE, LAUNCH = 4096, 5.0  # bytes; microseconds of the host for an op
WARM, COLD, FLUSH, GAP = 3.0, 9.0, 40.0, 7.0  # microseconds of the device; before an op that it has to wait for
ROOM = 1 << 20


class Device:
    """A GPU with a queue and an L2 cache, which notes what it is asked to do."""

    def __init__(self) -> None:
        self.host = self.done = 0.0
        self.log, self.buffers, self.flushed = list[str](), list[int](), False
        self.full = False  # True if no op fits beside a buffer

    def run(self) -> None:
        if self.full and self.buffers:
            raise torch.OutOfMemoryError
        self._queue("run", COLD if self.flushed else WARM)
        self.flushed = False

    def empty(self, nbytes: int, **_: object) -> Any:
        self.buffers.append(nbytes)
        return SimpleNamespace(zero_=self._flush)

    def _flush(self) -> None:
        self._queue("flush", FLUSH)
        self.flushed = True

    def _queue(self, what: str, us: float) -> None:
        self.log.append(what)
        self.host += LAUNCH
        self.done = max(self.done, self.host + GAP) + us

    def Event(self, enable_timing: bool = False) -> Any:
        event = SimpleNamespace(at=0.0, synchronize=lambda: self.log.append("wait"))
        event.record = lambda stream: self._mark(event)
        event.elapsed_time = lambda end: (end.at - event.at) / 1e3
        return event

    def _mark(self, event: Any) -> None:
        self.log.append("event")
        event.at = max(self.done, self.host)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(L2_cache_size=CACHE))
    monkeypatch.setattr(torch.cuda, "Event", device.Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    monkeypatch.setattr(
        op_profiler,
        "torch",
        SimpleNamespace(**vars(torch) | {"empty": lambda *args, **kwargs: device.empty(*args, **kwargs)}),
    )
    return device


def test_the_cache_is_flushed_before_each_run_and_events_leave_the_flush_and_launches_out(device: Device) -> None:
    assert cold_us(device.run, WARM, GPU, 100, ROOM) == COLD
    queued = ["flush", "event", "run", "event"] * RUNS
    assert device.log[: len(queued)] == queued  # the host waits for none before all are queued
    assert set(device.log[len(queued) :]) == {"wait"}
    assert device.buffers == [FLUSHED * CACHE]


def test_a_price_is_never_below_that_of_runs_one_behind_the_other(device: Device) -> None:
    assert cold_us(device.run, 12.0, GPU, 100, ROOM) == 12.0  # what the host takes to launch it, say


@pytest.mark.parametrize(("nbytes", "flushes"), [(LARGE * CACHE - 1, RUNS), (LARGE * CACHE, 0)])
def test_operands_much_larger_than_the_cache_need_no_flush(device: Device, nbytes: int, flushes: int) -> None:
    cold_us(device.run, WARM, GPU, nbytes, ROOM)
    assert device.log.count("flush") == flushes and len(device.buffers) == bool(flushes)


@pytest.mark.parametrize(("warm_us", "runs"), [(10_000.0, 3), (40_000.0, 0)])
def test_a_long_op_is_run_a_few_times_or_not_again(device: Device, warm_us: float, runs: int) -> None:
    assert cold_us(device.run, warm_us, GPU, 100, ROOM) == warm_us
    assert device.log.count("run") == runs


@pytest.mark.parametrize(("room", "buffers"), [(-1, []), (CACHE - 1, []), (CACHE + 1, [CACHE + 1])])
def test_the_buffer_takes_no_more_than_there_is_room_for(device: Device, room: int, buffers: list[int]) -> None:
    assert cold_us(device.run, WARM, GPU, 100, room) == (COLD if buffers else WARM)
    assert device.buffers == buffers


def test_where_memory_runs_out_beside_the_buffer_the_price_is_that_of_warm_operands(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    device.full = True
    assert cold_us(device.run, WARM, GPU, 100, ROOM) == WARM and device.buffers

    def refuse(nbytes: int, **_: object) -> Any:
        raise torch.OutOfMemoryError

    device.empty = refuse  # type: ignore[method-assign]
    assert cold_us(device.run, WARM, GPU, 100, ROOM) == WARM


class Priced:
    """An op of a made-up device, which asks for 600 bytes: 120 of results, and 480 more."""

    def __init__(self, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log, self.rooms = list[str](), list[int]()
        graph = fx.Graph()
        x = graph.placeholder("x")
        self.node = graph.call_function(torch.ops.aten.mul.Tensor, (x, x))
        with FakeTensorMode():
            x.meta["val"], self.node.meta["val"] = (torch.empty(30, device=device) for _ in range(2))
        of_the_host: Any = [torch.ones(30), torch.ones(30)], {}
        monkeypatch.setenv("MEMGRAPH_CACHE", "")
        monkeypatch.setattr(op_cost, "environment_key", str)
        for name, stand_in in {
            "_known": {}, "generated_arguments": lambda *_: of_the_host,
            "measure_peak": self._measured, "timed_us": lambda run, _: (run(), 5.0),
            "shortest_us": lambda *_, **__: 5.0, "cold_us": self._cold,
        }.items():  # fmt: skip
            monkeypatch.setattr(op_profiler, name, stand_in)
        fork = torch.random.fork_rng
        monkeypatch.setattr(torch.random, "fork_rng", lambda devices: fork([]))

    def _measured(self, work: Any, device: torch.device) -> tuple[Any, Allocation]:
        self.log.append("workspace")
        return work(), Allocation(600, 120)

    def _cold(self, run: Any, warm_us: float, device: torch.device, nbytes: int, room: int) -> float:
        assert isinstance(run(), Tensor) and (device, nbytes) == (GPU, 240)
        self.log.append("time")
        self.rooms.append(room)
        return warm_us + 1.0


@pytest.mark.parametrize(("device", "workspace"), [(GPU, 512), (CPU, 480)])
def test_a_workspace_of_a_gpu_is_counted_in_whole_blocks(
    device: torch.device, workspace: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = Priced(device, monkeypatch)
    assert OpProfiler(ROOM)(op.node).workspace == workspace


def test_an_op_that_runs_out_of_memory_in_its_run_has_no_workspace_of_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's error is a RuntimeError, as that of an op that does not accept made-up values is."""
    op = Priced(GPU, monkeypatch)

    def full(work: Any, device: torch.device) -> Any:
        op.log.append("full")
        raise torch.OutOfMemoryError

    monkeypatch.setattr(op_profiler, "measure_peak", full)
    monkeypatch.setattr(op_profiler, "release_cached", lambda device: op.log.append("released"))
    monkeypatch.setattr(op_profiler, "roofline", lambda *_: 7.0)
    with pytest.warns(RuntimeWarning, match="not enough memory is left to run"):
        assert OpProfiler(ROOM)(op.node) == Cost(7.0, 120)
    assert op.log == ["full", "released"] * 2


@pytest.mark.parametrize(("limit", "room"), [(2000, None), (2000, 1000), (1000, 2000)])
def test_the_buffer_comes_after_the_workspace_and_gets_what_the_budget_has_left(
    limit: int, room: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = Priced(GPU, monkeypatch)
    assert OpProfiler(limit, room)(op.node) == Cost(6.0, 512)
    assert op.log == ["workspace", "time"]
    assert op.rooms == [min(limit, room or limit) - 240 - 512]


def test_an_op_of_a_cpu_is_not_timed_that_way(monkeypatch: pytest.MonkeyPatch) -> None:
    op = Priced(CPU, monkeypatch)
    assert OpProfiler(ROOM)(op.node).us == 5.0 and op.log == ["workspace"]
