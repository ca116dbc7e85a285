"""A recording that CUDA refuses ends well, and is the last of the process; backward is recorded in autograd's thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from memgraph.errors import RecordingError
from memgraph.runtime import cuda_graphs
from memgraph.runtime.backward_thread import run_in_backward
from memgraph.runtime.cuda_graphs import CudaGraphCache, CudaRecorder, recording_stream

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


class Graph:
    """A CUDA graph that is replayed by doing nothing."""

    def replay(self) -> None: ...


@pytest.fixture(name="ended")
def _ended(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """A GPU that ends a capture with an error if something failed in it; the pools that its allocator has left."""
    pools: list[object] = []

    @contextmanager
    def capture(graph: Graph, **given: Any) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture") from error

    def leave(device: int, pool: object) -> None:
        pools.append(pool)
        if len(pools) > 1:
            raise RuntimeError("not recording to this pool")

    for name, value in {
        "CUDAGraph": Graph,
        "graph": capture,
        "Event": object,
        "graph_pool_handle": lambda: (0, 7),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: object())
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", leave, raising=False)
    monkeypatch.setattr(CudaRecorder, "failures", [])
    recording_stream.cache_clear()
    yield pools
    recording_stream.cache_clear()


def refused() -> None:
    raise ValueError("a number that the host reads")


def test_the_allocator_leaves_the_pool_of_a_failed_recording_and_a_warning_says_so(ended: list[object]) -> None:
    recorder = CudaRecorder(GPU)
    with pytest.raises(RuntimeError, match="during capture"), pytest.warns(RuntimeWarning, match="op by op"):
        recorder.record(refused)
    assert ended == [(0, 7)]


def test_an_allocator_that_has_left_the_pool_already_hides_no_error(ended: list[object]) -> None:
    ended.append("left before")
    with pytest.raises(RuntimeError, match="during capture"), pytest.warns(RuntimeWarning):
        CudaRecorder(GPU).record(refused)


@pytest.mark.usefixtures("ended")
def test_no_step_is_recorded_after_a_recording_has_failed() -> None:
    with pytest.raises(RuntimeError), pytest.warns(RuntimeWarning):
        CudaRecorder(GPU).record(refused)
    made: list[object] = []
    with pytest.raises(RecordingError, match="an earlier recording of this process has failed"):
        CudaGraphCache(lambda: CudaRecorder(GPU)).ready((), lambda *given: made.append(given))  # type: ignore[arg-type]
    assert made == []


@pytest.mark.usefixtures("ended")
def test_all_steps_of_a_device_are_recorded_on_one_stream() -> None:
    first, second = CudaRecorder(GPU), CudaRecorder(GPU)
    assert first.stream is second.stream
    assert first.record(lambda: 3)[0] == 3


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
