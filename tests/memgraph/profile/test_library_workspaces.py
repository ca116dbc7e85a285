"""Both threads allocate cuBLAS's workspaces before anything is measured, and the workspaces are counted."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memgraph.profile import library_workspaces
from memgraph.profile.library_workspaces import add_library_workspaces, libraries_nbytes
from memgraph.profile.memory_meter import Allocation
from passes import Op, Storage, Trace
from passes.cuda_graph_memory import add_recording_memory, recording_nbytes

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
STEP = Trace((Op("x", "input", makes=(Storage("x", 512),), holds=("x",)),))


class Workspaces:
    """A GPU whose cuBLAS keeps 1000 bytes for each stream; `threads` are those that have multiplied."""

    def __init__(self) -> None:
        self.streams, self.stream = set[object](), "default"
        self.threads = list[str]()

    def multiply(self, device: torch.device) -> None:
        self.threads.append(threading.current_thread().name)
        self.streams.add(self.stream)

    def measured(self, work: Callable[[], None], device: torch.device) -> tuple[None, Allocation]:
        before = len(self.streams)
        work()
        return None, Allocation(peak=1500, net=1000 * (len(self.streams) - before))

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        before, self.stream = self.stream, stream
        yield
        self.stream = before


@pytest.fixture(name="workspaces")
def _workspaces(monkeypatch: pytest.MonkeyPatch) -> Workspaces:
    found = Workspaces()
    monkeypatch.setattr(library_workspaces, "_known", {})
    monkeypatch.setattr(library_workspaces, "_here", threading.local())
    monkeypatch.setattr(library_workspaces, "measure_peak", found.measured)
    monkeypatch.setattr(library_workspaces, "_multiply", found.multiply)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(torch.cuda, "stream", found.on)
    monkeypatch.setattr(library_workspaces, "_usual_nbytes", lambda device: 500)
    return found


def test_on_a_cpu_there_are_none() -> None:
    assert libraries_nbytes(CPU) == 0 and add_library_workspaces(STEP, CPU) is STEP


def test_they_are_measured_once_and_each_thread_has_its_own(workspaces: Workspaces) -> None:
    for _ in range(2):
        assert libraries_nbytes(GPU) == 1000
    thread = threading.Thread(target=libraries_nbytes, args=(GPU,), name="another")
    thread.start()
    thread.join()
    assert workspaces.threads == ["MainThread", "another"]


def test_those_that_are_there_already_are_counted_and_stay(workspaces: Workspaces) -> None:
    workspaces.streams.add("default")
    assert libraries_nbytes(GPU) == 1000
    assert workspaces.streams == {"default"}


@pytest.mark.parametrize(
    ("major", "blas", "light", "expected"),
    [
        (9, "", "", (32 << 20) + (1 << 20)),
        (8, "", "", 8519680 + (1 << 20)),
        (9, ":4096:2:16:8", "", 8519680 + (1 << 20)),
        (9, "", "8192", 40 << 20),
    ],
)
def test_the_usual_size_is_torchs(
    major: int, blas: str, light: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    for name, value in (("CUBLAS_WORKSPACE_CONFIG", blas), ("CUBLASLT_WORKSPACE_SIZE", light)):
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    assert library_workspaces._usual_nbytes(GPU) == expected


@pytest.mark.usefixtures("workspaces")
def test_a_step_counts_them_throughout_and_a_recording_as_many_again() -> None:
    """Its halves are recorded in both threads."""
    step = add_library_workspaces(STEP, GPU)
    assert str(step.ops[0]) == "libraries = buffer()  # makes libraries:1000 | at cuBLAS"
    assert (recording_nbytes(STEP), recording_nbytes(step)) == (512, 512 + 1000)
    assert add_recording_memory(step).ops[0].nbytes == 1512


class Products(TorchDispatchMode):
    """Counts products by name."""

    def __init__(self, seen: Counter[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def test_there_is_a_product_of_each_kind_in_forward_and_in_backward() -> None:
    seen = Counter[str]()
    with torch.inference_mode(), Products(seen):
        library_workspaces._multiply(CPU)
    assert (seen["aten::mm"], seen["aten::addmm"]) == (2, 2)


def test_deterministic_algorithms_forbid_the_products_without_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: torch.device) -> None:
        raise RuntimeError("Deterministic behavior was enabled")

    monkeypatch.setattr(library_workspaces, "_products", refuse)
    library_workspaces._multiply(CPU)
