"""A recording that CUDA refuses ends well, and is the last of the process; backward is recorded in autograd's thread."""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest
import torch

from memgraph.errors import RecordingError
from memgraph.runtime import cuda_graphs
from memgraph.runtime.cuda_graphs import CudaGraphCache, CudaRecorder, run_in_backward

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


class Device:
    """A GPU that ends a capture with an error if something failed in it, and what torch has of it.

    Attributes:
        stream: the current one.
        left: the pools that the allocator has left.
        is_drawing: False while the generator is in a capture.
        refuses: True if no capture can begin.
        graphs_leave: True if a graph leaves its pool itself when it is reset or freed, as from torch 2.14 on.
        has_ended: True if a graph that was freed has found that its pool was left: torch ends the process.
    """

    def __init__(self) -> None:
        self.stream: object = "the caller's"
        self.left: list[object] = []
        self.is_drawing = True
        self.refuses = self.graphs_leave = self.has_ended = False

    @contextmanager
    def on_stream(self, stream: object) -> Iterator[None]:
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def leave(self, device: int, pool: object) -> None:
        if pool in self.left:
            raise RuntimeError("not recording to this pool")
        self.left.append(pool)


class Graph:
    """A CUDA graph that is replayed by doing nothing."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.pool: object = None

    def replay(self) -> None: ...

    def reset(self) -> None:
        pool, self.pool = self.pool, None
        if pool is not None and self.device.graphs_leave:
            self.device.leave(0, pool)

    def __del__(self) -> None:
        try:
            self.reset()
        except RuntimeError:
            self.device.has_ended = True


@pytest.fixture(name="gpu")
def _gpu(monkeypatch: pytest.MonkeyPatch) -> Device:
    device, pools = Device(), count(7)

    class Capture:
        """As torch.cuda.graph does, it restores the stream only if the capture has ended without an error."""

        def __init__(self, graph: Graph, stream: object, pool: object, **given: Any) -> None:
            self.graph, self.stream, self.pool = graph, stream, pool

        def __enter__(self) -> None:
            self.before, device.stream, device.is_drawing = device.stream, self.stream, False
            self.graph.pool = self.pool
            if device.refuses:
                raise RuntimeError("CUDA error: operation not permitted")

        def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
            if isinstance(error, ValueError):
                raise RuntimeError("CUDA error: operation failed due to a previous error during capture") from error
            self.graph.pool, device.stream, device.is_drawing = None, self.before, True

    for name, value in {
        "CUDAGraph": lambda: Graph(device),
        "graph": Capture,
        "Event": object,
        "graph_pool_handle": lambda: (0, next(pools)),
        "Stream": lambda device: object(),
        "stream": device.on_stream,
        "current_stream": lambda _: device.stream,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", device.leave, raising=False)
    for name, value in {"failures": [], "failed": [], "idle": defaultdict(list)}.items():
        monkeypatch.setattr(CudaRecorder, name, value)
    return device


def refused() -> None:
    raise ValueError("a number that the host reads")


def test_the_allocator_leaves_the_pool_of_a_failed_recording_and_a_warning_says_so(gpu: Device) -> None:
    recorder = CudaRecorder(GPU)
    with pytest.raises(RuntimeError, match="during capture"), pytest.warns(RuntimeWarning, match="op by op"):
        recorder.record(refused)
    assert gpu.left == [(0, 7)]


def test_an_allocator_that_has_left_the_pool_already_hides_no_error(gpu: Device) -> None:
    gpu.left.append((0, 7))
    with pytest.raises(RuntimeError, match="during capture"), pytest.warns(RuntimeWarning):
        CudaRecorder(GPU).record(refused)


def test_what_runs_after_a_failed_recording_is_on_the_callers_stream_and_may_draw(gpu: Device) -> None:
    with pytest.raises(RuntimeError), pytest.warns(RuntimeWarning):
        CudaRecorder(GPU).record(refused)
    assert gpu.stream == "the caller's" and gpu.is_drawing


@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.parametrize("graphs_leave", [False, True])
def test_each_pool_is_left_once_whoever_does_it(gpu: Device, graphs_leave: bool, refuses: bool) -> None:
    gpu.graphs_leave, gpu.refuses = graphs_leave, refuses
    with pytest.raises(RuntimeError), pytest.warns(RuntimeWarning):
        CudaRecorder(GPU).record(refused)
    CudaRecorder.failed.clear()  # as when the process ends
    assert gpu.left == ([(0, 7), (0, 8)] if refuses else [(0, 7)])
    assert gpu.stream == "the caller's" and not gpu.has_ended


def test_the_graph_of_a_failed_recording_stays(gpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's allocator of pinned memory has a function of the graph, and calls it at each allocation."""
    graphs: list[weakref.ref[Graph]] = []

    def made() -> Graph:
        graph = Graph(gpu)
        graphs.append(weakref.ref(graph))
        return graph

    monkeypatch.setattr(torch.cuda, "CUDAGraph", made)
    with pytest.raises(RuntimeError), pytest.warns(RuntimeWarning):
        CudaRecorder(GPU).record(refused)
    assert graphs[0]() is not None


@pytest.mark.usefixtures("gpu")
def test_no_step_is_recorded_after_a_recording_has_failed() -> None:
    with pytest.raises(RuntimeError), pytest.warns(RuntimeWarning):
        CudaRecorder(GPU).record(refused)
    made: list[object] = []
    with pytest.raises(RecordingError, match="an earlier recording of this process has failed"):
        CudaGraphCache(lambda: CudaRecorder(GPU)).ready((), lambda *given: made.append(given))  # type: ignore[arg-type]
    assert made == []


@pytest.mark.usefixtures("gpu")
def test_recordings_that_exist_have_a_stream_each_and_later_ones_take_it_over() -> None:
    """The end of a graph frees the workspaces of its stream, which others would still use."""
    first, second = CudaRecorder(GPU), CudaRecorder(GPU)
    assert first.record(lambda: 3)[0] == 3
    assert first.stream is not second.stream
    stream = first.stream
    del first
    third, other = CudaRecorder(GPU), CudaRecorder(torch.device("cuda", 1))
    assert third.stream is stream and other.stream not in (stream, second.stream)


def test_on_a_cpu_backward_runs_in_the_callers_thread_and_so_does_the_function() -> None:
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert run_in_backward(threading.get_ident, CPU) == threading.get_ident()


def test_an_error_of_the_function_is_raised_as_it_is() -> None:
    with pytest.raises(ValueError, match="a number that the host reads"):
        run_in_backward(refused, CPU)


def test_a_step_records_backward_and_nothing_else_in_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[torch.device] = []

    class Recorder:
        def record(self, run: Any) -> Any:
            return run(), None

    class Run:
        def __init__(self, *given: Any) -> None:
            self.lease = None

        def forward(self, *given: Any) -> list[Any]:
            assert not ran
            return []

        def backward(self, *given: Any, keep: bool) -> list[Any]:
            assert ran
            return []

        def close(self) -> None: ...

    def noted(run: Any, device: torch.device) -> Any:
        ran.append(device)
        return run()

    class Halves:
        backward, tangents = object(), ()

    monkeypatch.setattr(cuda_graphs, "run_in_backward", noted)
    monkeypatch.setattr(cuda_graphs, "StepRun", Run)
    recorder: Any = Recorder()
    recorder.wait = int
    cuda_graphs.CudaGraphPair(Halves(), None, [torch.empty(1)], [0], 0, recorder)  # type: ignore[arg-type]
    assert ran == [CPU]
