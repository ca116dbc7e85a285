"""Both threads allocate cuBLAS's workspaces before anything is measured, and the workspaces are counted."""

from __future__ import annotations

import threading
from collections import Counter
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


@pytest.fixture(name="multiplied")
def _multiplied(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A GPU with workspaces of 1000 bytes; the list names the threads that multiplied."""
    found: list[Any] = []

    def measured(work: Any, device: Any) -> Any:
        return work(), Allocation(peak=1500, net=1000)

    monkeypatch.setattr(library_workspaces, "_known", {})
    monkeypatch.setattr(library_workspaces, "_here", threading.local())
    monkeypatch.setattr(library_workspaces, "measure_peak", measured)
    monkeypatch.setattr(library_workspaces, "_multiply", lambda device: found.append(threading.current_thread().name))
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: found.append("cleared"), raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=7))
    return found


def test_on_a_cpu_there_are_none() -> None:
    assert libraries_nbytes(CPU) == 0 and add_library_workspaces(STEP, CPU) is STEP


def test_they_are_measured_once_and_each_thread_has_its_own(multiplied: list[Any]) -> None:
    for _ in range(2):
        assert libraries_nbytes(GPU) == 1000
    thread = threading.Thread(target=libraries_nbytes, args=(GPU,), name="another")
    thread.start()
    thread.join()
    assert multiplied == ["cleared", "MainThread", "another"]


@pytest.mark.usefixtures("multiplied")
def test_a_step_counts_them_throughout_and_a_recording_half_of_them_again() -> None:
    step = add_library_workspaces(STEP, GPU)
    assert str(step.ops[0]) == "libraries = buffer()  # makes libraries:1000 | at cuBLAS"
    assert (recording_nbytes(STEP), recording_nbytes(step)) == (512, 512 + 500)
    assert add_recording_memory(step).ops[0].nbytes == 1012


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
