"""What is asked of a device, as far as it can be told without one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

import memgraph
from memgraph.device import block_nbytes, hold_to, unused_nbytes
from memgraph.refusal import is_elsewhere
from memgraph.summarize import summarize
from tests.nets import net

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.mark.parametrize(("nbytes", "taken"), [(0, 0), (1, 512), (512, 512), (513, 1024)])
def test_a_gpus_allocator_takes_whole_blocks(nbytes: int, taken: int) -> None:
    assert block_nbytes(nbytes, GPU) == taken
    assert block_nbytes(nbytes, CPU) == nbytes


@pytest.mark.parametrize(("device", "nbytes"), [(GPU, 512), (CPU, 40)])
def test_a_trace_counts_what_the_allocator_takes(device: torch.device, nbytes: int) -> None:
    graph = fx.Graph()
    node = graph.placeholder("x")
    with FakeTensorMode():
        node.meta = {"kind": "input", "val": torch.empty(10, device=device)}
    graph.output((node,)).meta = {"kinds": ("output",)}
    assert summarize(graph).op["x"].nbytes == nbytes


def test_strict_has_the_allocator_refuse_what_is_over_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=16_000))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *args: told.append(args))
    hold_to(4_000, GPU)
    hold_to(32_000, GPU)
    assert told == [(0.25, GPU), (1.0, GPU)]


def test_strict_on_a_cpu_is_refused() -> None:
    with pytest.raises(ValueError, match=r"strict=True .* lies on cpu; .*RLIMIT_DATA"):
        memgraph.compile(net(), "1GB", strict=True)


def test_what_torch_keeps_of_a_gpu_for_later_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000, 5000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 700)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 400)
    assert unused_nbytes(GPU) == 1300


@pytest.mark.parametrize(
    "said",
    [
        "Unhandled FakeTensor Device Propagation for aten.mm.default, found two different devices cuda:0, cpu",  # 2.11
        "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
    ],
)
def test_two_devices_are_seen_in_the_words_of_each_torch(said: str) -> None:
    assert is_elsewhere(RuntimeError(said))
    assert not is_elsewhere(RuntimeError("CUDA out of memory")) and not is_elsewhere(memgraph.CaptureError(said))
