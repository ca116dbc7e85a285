"""Steps of the ops that CUDA dispatches are captured, planned and rewritten, without a device."""

from __future__ import annotations

import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.fake_cuda import op_checks
from benchmarks.fake_cuda.models import FLOAT, HALF, SMALL, Subject
from benchmarks.fake_cuda.planned_step import PlannedStep, captured, planned_step
from benchmarks.zoo.architectures import ARCHITECTURES
from memgraph.errors import CaptureError
from memgraph.fit.device_profile import read_profile
from memgraph.report.repeatability import UNREPEATABLE
from memgraph.runtime.autograd_function import wait_at_end
from memgraph.runtime.cuda_graphs import _Call, run_in_backward

pytestmark = pytest.mark.fake_cuda
CUDA = torch.device("cuda", 0)
PLANNED = [(name, dtype) for name in SMALL if name != "recurrent" for dtype in (FLOAT, HALF)]


@pytest.fixture(autouse=True)
def cache(described: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMGRAPH_CACHE", str(tmp_path))


def planned(name: str, dtype: torch.dtype) -> PlannedStep:
    return planned_step(Subject(name, SMALL[name], dtype), read_profile("h200"))


def ops(name: str, dtype: torch.dtype) -> set[str]:
    names = op_checks.op_names(captured(Subject(name, SMALL[name], dtype), CUDA).graph)
    return {each.removeprefix("aten.").removesuffix(".default") for each in names}


def test_a_described_device_has_memory_and_no_kernels() -> None:
    before = torch.cuda.memory_allocated()
    x = torch.ones(1000).to(CUDA)
    assert torch.cuda.memory_allocated() - before == 4096 and x.cpu().sum() == 1000
    with pytest.raises(RuntimeError, match="not supported"):
        x.add(1)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 40, dtype=torch.uint8, device=CUDA)


@pytest.mark.parametrize(("name", "dtype"), PLANNED)
def test_the_rewritten_graph_is_what_the_applied_text_says(name: str, dtype: torch.dtype) -> None:
    step = planned(name, dtype)
    assert step.law_holds
    assert bool(step.result.plan) == (name != "experts")


@pytest.mark.parametrize(("name", "dtype"), PLANNED)
def test_no_op_mixes_devices_and_no_op_that_writes_runs_again(name: str, dtype: torch.dtype) -> None:
    step = planned(name, dtype)
    assert op_checks.mixed_devices(step.graph) == []
    assert op_checks.repeated_writes(step.trace, step.graph) == []


def test_attention_with_dropout_is_the_kernel_that_torch_chooses_for_the_device() -> None:
    assert "_scaled_dot_product_efficient_attention" in ops("attention", FLOAT)
    assert "_scaled_dot_product_cudnn_attention" in ops("attention", HALF)


@pytest.mark.parametrize(
    ("dropout", "is_masked", "kernel"),
    [(0.0, True, "cudnn"), (0.125, True, "cudnn"), (0.1, False, "flash"), (0.1, True, "efficient")],
)
def test_dropout_decides_between_the_kernels_of_attention_in_bfloat16(
    dropout: float, is_masked: bool, kernel: str
) -> None:
    with FakeTensorMode():
        q = torch.empty(2, 4, 64, 64, device=CUDA, dtype=HALF, requires_grad=True)
        mask = torch.empty(2, 1, 64, 64, device=CUDA, dtype=torch.bool) if is_masked else None
        graph = make_fx(lambda q: F.scaled_dot_product_attention(q, q, q, mask, dropout))(q)
    assert any(f"{kernel}_attention" in str(node.target) for node in graph.graph.nodes)


@pytest.mark.parametrize(
    "backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]
)
def test_each_kernel_of_attention_is_captured(backend: SDPBackend) -> None:
    with sdpa_kernel(backend):
        found = ops("attention", HALF)
    name = backend.name.lower().removesuffix("_attention")
    assert any(f"{name}_attention" in op for op in found) == (backend != SDPBackend.MATH)


def test_batch_norm_is_cudnns_in_float32_and_updates_its_statistics_once() -> None:
    step = planned("convolutions", FLOAT)
    norms = [op for op in step.trace.ops if op.fn == "aten.cudnn_batch_norm.default"]
    assert len(norms) == 3 and all(op.once for op in norms)
    assert op_checks.writes(step.step.graph)["aten.cudnn_batch_norm.default"] == 3


def test_seeds_of_attention_alone_lie_on_the_host() -> None:
    step = planned("attention", FLOAT)
    assert set(op_checks.host_results(step.step.graph)) == {"aten._scaled_dot_product_efficient_attention.default"}


def test_a_recurrent_layer_of_cudnns_is_not_traced() -> None:
    with pytest.raises(CaptureError, match="cuDNN packs the weights"):
        planned("recurrent", FLOAT)


def test_a_grouped_product_pads_its_rows_as_the_kernel_does() -> None:
    step = captured(Subject("experts", SMALL["experts"], HALF), CUDA)
    forward = next(node for node in step.graph.nodes if "_grouped_mm" in str(node.target))
    assert forward.meta["val"].stride() == (64, 1)


def test_a_function_runs_in_the_thread_of_the_devices_backward() -> None:
    threads = {run_in_backward(threading.get_ident, CUDA) for _ in range(2)}
    assert len(threads) == 1 and threading.get_ident() not in threads


def test_the_callers_stream_is_current_at_the_end_of_a_backward_on_another() -> None:
    found, side = list[torch.cuda.Stream](), torch.cuda.Stream(CUDA)

    class Cuda:
        """torch.cuda, which notes the streams that are asked for."""

        Event = torch.cuda.Event

        @staticmethod
        def current_stream(device: torch.device) -> torch.cuda.Stream:
            found.append(torch.cuda.current_stream(device))
            return found[-1]

    with torch.cuda.stream(side):
        run = partial(wait_at_end, CUDA, Cuda)
        leaf = torch.empty(0, device=CUDA, requires_grad=True)
        output = _Call.apply(leaf, run)  # type: ignore[no-untyped-call]
    output.backward(torch.empty_like(output, requires_grad=False))
    assert found == [side, torch.cuda.current_stream(CUDA)] and found[0] != found[1]


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        ("upsample_bilinear2d_backward", ((1, 1, 8, 8), [8, 8], [1, 1, 4, 4], False)),
        ("_adaptive_avg_pool2d_backward", ((1, 1, 2, 2), (1, 1, 8, 8))),
        ("upsample_bicubic2d_backward", ((1, 1, 8, 8), [8, 8], [1, 1, 4, 4], False)),
        ("avg_pool3d_backward", ((1, 1, 2, 2, 2), (1, 1, 4, 4, 4), [2], [2], [0], False, True, None)),
    ],
)
def test_torch_says_that_these_ops_need_not_give_the_same_twice(op: str, arguments: tuple[object, ...]) -> None:
    assert op in UNREPEATABLE
    given = [torch.empty(each, device=CUDA) if isinstance(each, tuple) else each for each in arguments]
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
            getattr(torch.ops.aten, op)(*given)
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_ctc_loss_is_captured_without_a_kernel() -> None:
    step = planned_step(Subject("ctc", ARCHITECTURES["ctc"].make), read_profile("h200"))
    assert step.law_holds and "aten._ctc_loss_backward.Tensor" in op_checks.op_names(step.step.graph)


def test_a_name_that_no_model_has_is_an_error() -> None:
    command = [sys.executable, "-m", "benchmarks.fake_cuda", "--only", "no_such_model"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 1 and "there is no model named no_such_model" in ran.stdout
