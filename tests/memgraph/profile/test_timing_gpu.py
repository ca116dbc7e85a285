"""Times on a simulated GPU contain neither launches nor waits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from memgraph.profile.step_timer import Clock, StepTimes
from memgraph.storage import pinned_tier
from memgraph.storage.pinned_pool import PINNED_POOL
from memgraph.storage.pinned_tier import pinned_speed
from memgraph.system import timer
from memgraph.system.timer import LINE, shortest_us

GPU = torch.device("cuda", 0)
WAIT, LAUNCH = 20.0, 5.0  # microseconds: to be waited for, and of an op on the host


class Device:
    """A GPU with a launch time of LAUNCH and a kernel time of `us`."""

    def __init__(self, us: float) -> None:
        self.us, self.host, self.done, self.waits = us, 0.0, 0.0, list[object]()

    def run(self) -> None:
        self.host += LAUNCH
        self.done = max(self.done, self.host) + self.us

    def synchronize(self, device: object = None) -> None:
        self.waits.append(device)
        self.host = max(self.host, self.done) + WAIT

    def Event(self, enable_timing: bool = False) -> Any:
        event = SimpleNamespace(at=0.0, synchronize=self.synchronize)
        event.record = lambda stream: setattr(event, "at", max(self.done, self.host))
        event.elapsed_time = lambda end: (end.at - event.at) / 1e3
        return event


@pytest.mark.parametrize(("us", "least"), [(8.0, 8.0), (2.0, LAUNCH), (50_000.0, 50_000.0)])
def test_short_work_takes_what_it_does_behind_other_work(
    us: float, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(us)
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    monkeypatch.setattr(timer, "time", SimpleNamespace(perf_counter=lambda: device.host / 1e6))
    assert least <= shortest_us(device.run, GPU) <= least + (WAIT + LAUNCH) * (1 if us > 6e3 else 2 / LINE)
    assert set(device.waits) == {GPU}  # which need not be the current one


def test_no_op_of_a_step_is_waited_for_while_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(8.0)
    monkeypatch.setattr(torch.cuda, "Event", device.Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    clock, waited = Clock(GPU), list[int]()

    def work(x: Tensor) -> Tensor:
        device.run()
        waited.append(len(device.waits))
        return x.neg()

    graph = fx.Graph()
    x = graph.placeholder("x")
    for _ in range(10):
        x = graph.call_function(work, (x,))
    graph.output(x)
    clock.run(fx.GraphModule({}, graph), torch.ones(3))  # type: ignore[arg-type]
    assert waited == [0] * 10 and device.waits
    assert [clock.ops[f"work_{i}"] for i in range(1, 10)] == pytest.approx([8.0] * 9)
    assert clock.us == pytest.approx(LAUNCH + 80.0)


def test_copies_are_timed_one_behind_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    device, empty, copies = Device(8.0), torch.empty, list[set[bool]]()

    class Copied(Tensor):
        def copy_(self, other: object, *_: object, **__: object) -> Any:
            copies.append({isinstance(self, OfBlock), isinstance(other, OfBlock)})
            device.run()

    class OfBlock(Copied):
        pass

    monkeypatch.setattr(torch, "empty", lambda n, **_: empty(n, dtype=torch.uint8).as_subclass(Copied))
    monkeypatch.setattr(torch.cuda, "Event", device.Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    closed = list[int]()

    class Block:
        """A block as steps have them, which alone is copied to."""

        def __init__(self, nbytes: int, device: torch.device, allocator: object) -> None:
            assert device == GPU and allocator is PINNED_POOL.allocator
            self.bytes = empty(nbytes, dtype=torch.uint8).as_subclass(OfBlock)
            self.close = lambda: closed.append(nbytes)

    monkeypatch.setattr(pinned_tier, "PinnedBlock", Block)
    out, back = pinned_speed.__wrapped__(GPU, 800, 16)
    assert (out, back) == pytest.approx((800 / (8.0 + LAUNCH / 16),) * 2)
    assert copies == [{True, False}] * 2 * 5 * 16 and closed == [4096]  # between the block and the device


def test_a_wait_that_overlaps_an_op_does_not_make_its_time_negative() -> None:
    times = StepTimes({"update": 50.0, "mm": 10.0}, 60.0).without({"update": 80.0, "mm": 4.0})
    assert times.ops == {"update": 0.0, "mm": 6.0}
