"""Calls to a GPU, as far as they can be tested without one."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

import memgraph
from memgraph.capture.explain_errors import is_device_mismatch
from memgraph.graph.summarize import Cost, summarize
from memgraph.profile import op_cost, op_profiler
from memgraph.profile.op_cost import OpCost
from memgraph.profile.op_profiler import OpProfiler
from memgraph.system import planning_process
from memgraph.system.byte_sizes import budget_nbytes
from memgraph.system.device import block_nbytes, headroom_nbytes, hold_to, unused_nbytes
from memgraph.system.planning_process import planning
from tests.support.models import net

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
    with pytest.raises(ValueError, match=r"strict=True .* is on cpu; .*RLIMIT_DATA"):
        memgraph.compile(net(), "1GB", strict=True)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU of 64 GB with 1000 bytes free and 300 cached by torch; `.fraction` is the limit of the process."""
    found = SimpleNamespace(fraction=1.0, total=64 << 30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000, found.total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 700)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 400)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: found.fraction)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=found.total))
    return found


def test_what_torch_keeps_of_a_gpu_for_later_is_free_as_far_as_the_process_may_take_it(gpu: SimpleNamespace) -> None:
    assert unused_nbytes(GPU) == 1300
    gpu.fraction = 1000 / gpu.total  # as `strict` sets it
    assert unused_nbytes(GPU) == 600
    gpu.fraction = 100 / gpu.total
    assert unused_nbytes(GPU) == 0


@pytest.mark.parametrize(
    ("gigabytes", "conf", "left"),
    [(16, "", 1 << 30), (64, "", (64 << 30) * 3 // 100), (64, "expandable_segments: True,x:1", 1 << 30)],
)
def test_a_budget_of_all_that_is_free_leaves_a_gpu_room(
    gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, gigabytes: int, conf: str, left: int
) -> None:
    gpu.total = gigabytes << 30
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", conf)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (8 << 30, gpu.total))
    assert headroom_nbytes(GPU) == left
    assert budget_nbytes(None, GPU, resident=50) == (8 << 30) + 300 - left + 50
    assert headroom_nbytes(CPU) == 0


@pytest.mark.parametrize("failures", [1, 2])
def test_an_op_that_runs_out_of_memory_while_it_is_priced_is_tried_again_without_what_others_left(
    failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, released = [torch.OutOfMemoryError()] * failures, list[torch.device]()

    def run(node: fx.Node, before: object) -> OpCost:
        if found:
            raise found.pop()
        return OpCost(Cost(5.0, 100), ())

    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(torch.ops.aten.mul.Tensor, (x, x))
    with FakeTensorMode():
        x.meta["val"], node.meta["val"] = torch.empty(30, device=GPU), torch.empty(30, device=GPU)
    monkeypatch.setattr(op_profiler, "_measure", run)
    monkeypatch.setattr(op_profiler, "release_cached", released.append)
    monkeypatch.setattr(op_profiler, "read_cached", lambda key: None)
    monkeypatch.setattr(op_profiler, "read_all_cached", dict.fromkeys)
    monkeypatch.setattr(op_cost, "environment_key", str)
    monkeypatch.setattr(op_profiler, "roofline", lambda *_: 7.0)
    monkeypatch.setattr(op_profiler, "flush_caches", lambda _: None)
    monkeypatch.setattr(op_profiler, "_known", {})
    priced = nullcontext() if failures == 1 else pytest.warns(RuntimeWarning, match=r"aten.mul.Tensor .* is guessed")
    with priced:
        cost = OpProfiler(1 << 30)(node)
    assert cost == (Cost(5.0, 100) if failures == 1 else Cost(7.0, 120))
    assert released == [GPU] * failures


@pytest.mark.parametrize("fails", [False, True])
def test_what_planning_leaves_in_a_gpus_allocator_is_freed(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[torch.device] = []
    monkeypatch.setattr(planning_process, "release_cached", released.append)
    with suppress(ValueError), planning(GPU):
        assert not released
        if fails:
            raise ValueError
    assert released == [GPU]


@pytest.mark.parametrize(
    "said",
    [
        "Unhandled FakeTensor Device Propagation for aten.mm.default, found two different devices cuda:0, cpu",  # 2.11
        "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
    ],
)
def test_two_devices_are_seen_in_the_words_of_each_torch(said: str) -> None:
    assert is_device_mismatch(RuntimeError(said))
    assert not is_device_mismatch(RuntimeError("CUDA out of memory")) and not is_device_mismatch(
        memgraph.CaptureError(said)
    )
