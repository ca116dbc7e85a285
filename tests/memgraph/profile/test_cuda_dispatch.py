"""Differences of GPU kernels from CPU kernels, on fake tensors and on a replacement op."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import memgraph
from memgraph.capture.constant_fake_mode import ConstantFakeMode
from memgraph.graph.nodes import aten
from memgraph.graph.summarize import summarize
from memgraph.optim.offloaded_update import OffloadedUpdate
from memgraph.optim.update_operands import PARAMETER, ParameterUpdate, UpdateOperand
from memgraph.optim.window_plan import plan_windows
from memgraph.planning import search
from memgraph.profile import generated_arguments
from tests.support.forced_plans import all_given_up

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def attention(q: Tensor) -> Tensor:
    """Forward and backward, as autograd runs them on a GPU in float32."""
    out, sums, seed, offset = aten._scaled_dot_product_efficient_attention(q, q, q, None, True, 0.1)
    backward = aten._scaled_dot_product_efficient_attention_backward
    return backward(out, q, q, q, None, out, sums, seed, offset, 0.1, [True, True, True, False])[0]


def node_of(graph: fx.GraphModule, target: Any) -> fx.Node:
    (found,) = graph.graph.find_nodes(op="call_function", target=target)
    return found


def test_the_seeds_of_attention_lie_on_the_host_where_backward_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with ConstantFakeMode(), torch.no_grad():
        graph = make_fx(attention)(torch.empty(2, 4, 8, 16, device=GPU))
    forward = node_of(graph, aten._scaled_dot_product_efficient_attention.default)
    assert [value.device for value in forward.meta["val"]] == [GPU, GPU, CPU, CPU]
    filled = list[Tensor]()
    monkeypatch.setattr(generated_arguments, "_fill", lambda fake, number: filled.append(fake))
    backward = node_of(graph, aten._scaled_dot_product_efficient_attention_backward.default)
    generated_arguments.generated_arguments(backward, GPU, 0, False)
    assert [value.device for value in filled if value.dtype == torch.int64] == [CPU, CPU]
    assert backward.meta["val"][0].device == GPU


def test_the_seeds_count_as_blocks_of_the_device_where_a_recording_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memgraph.graph.summarize.state_nbytes", lambda device: 16)
    with ConstantFakeMode(), torch.no_grad():
        graph = make_fx(attention)(torch.empty(2, 4, 8, 16, device=GPU))
    for node in graph.graph.find_nodes(op="placeholder"):
        node.meta["kind"] = "input"
    graph.graph.output_node().meta["kinds"] = ["output"]
    graph.graph.output_node().args = ([graph.graph.output_node().args[0]],)
    (op,) = (op for op in summarize(graph.graph).ops if "efficient_attention.default" in op.fn)
    assert [storage.nbytes for storage in op.makes[2:]] == [512, 512]


class Normed(nn.Module):
    """Layers with a batch norm that behaves like cuDNN's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.register_buffer("running_mean", torch.zeros(64))
        self.register_buffer("running_var", torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.ops.memgraph_tests.quiet_batch_norm(layer(x), self.running_mean, self.running_var, True).relu()
        return x.square().mean()


@pytest.fixture(scope="module")
def quiet() -> Iterator[None]:
    """`quiet_batch_norm` changes running statistics in place, and its schema says nothing of it."""
    library = torch.library.Library("memgraph_tests", "DEF")
    library.define("quiet_batch_norm(Tensor x, Tensor? running_mean, Tensor? running_var, bool training) -> Tensor")

    def norm(x: Tensor, mean: Tensor, var: Tensor, training: bool) -> Tensor:
        if training:
            mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
            var.mul_(0.9).add_(x.var(0), alpha=0.1)
        return x * 2

    library.impl("quiet_batch_norm", norm, "CPU")
    name = "memgraph_tests::quiet_batch_norm"
    torch.library.register_fake(name, lambda x, mean, var, training: torch.empty_like(x), lib=library)
    torch.library.register_autograd(name, lambda ctx, gradient: (gradient * 2, None, None, None), lib=library)
    yield
    library._destroy()


@pytest.mark.long
@pytest.mark.usefixtures("quiet")
def test_statistics_that_an_op_updates_quietly_are_updated_once_however_much_is_recomputed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(search, "make_plan", all_given_up)
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(3))
    models = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = Normed()
        called = memgraph.compile(model, "1GB") if compiled else model
        for _ in range(3):
            model.zero_grad()
            called(x).backward()
        models.append(model)
    plain, ours = models
    assert any(decision for decision in called.plan.plan)  # type: ignore[union-attr]
    assert all(map(torch.equal, ours.buffers(), plain.buffers()))
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours.parameters(), plain.parameters(), strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("training", [True, False])
def test_cudnns_batch_norm_runs_once_where_it_updates_statistics(training: bool) -> None:
    def step(x: Tensor, w: Tensor, mean: Tensor, var: Tensor) -> list[Tensor]:
        later = mean + 0
        return [aten.cudnn_batch_norm(x, w, w, mean, var, training, 0.1, 1e-5)[0], later]

    with ConstantFakeMode(), torch.no_grad():
        x, w = torch.empty(2, 4, 8, 8), torch.empty(4)
        graph = make_fx(step)(x, w, w.clone(), w.clone())
    for node in graph.graph.find_nodes(op="placeholder"):
        node.meta["kind"] = "buffer"
    graph.graph.output_node().meta["kinds"] = ["output", "output"]
    once = {op.fn: op.once for op in summarize(graph.graph).ops if op.fn.startswith("aten")}
    assert once == {"aten.cudnn_batch_norm.default": training, "aten.add.Tensor": training}


@pytest.mark.parametrize(("device", "hosted", "most"), [(GPU, False, 20), (GPU, True, 2000), (CPU, False, 2000)])
def test_an_update_in_low_precision_is_cut_as_finely_as_a_cpu_wants_it_on_a_cpu_alone(
    device: torch.device, hosted: bool, most: int
) -> None:
    with ConstantFakeMode():
        weight = torch.empty(4096, 4096, dtype=torch.bfloat16, device=device)
        states = [torch.empty(4096, 4096, device=device) for _ in range(2)]
    tensors = dict(zip((PARAMETER, "exp_avg", "exp_avg_sq"), (weight, *states), strict=True))
    operands = {name: UpdateOperand(tensor, None, (0, 1), written=True) for name, tensor in tensors.items()}
    update = ParameterUpdate(weight, 0, {}, {}, operands=operands, on_host=hosted)
    windows = plan_windows([update.row], 16 << 20)
    chunks = [chunk for window in windows for chunk in window]
    assert most / 2 < len(chunks) <= most if most > 20 else len(chunks) == len(windows) <= most
    assert sum(chunk.count for chunk in chunks) == weight.numel()


@pytest.mark.parametrize(("device", "nbytes"), [(GPU, 128 << 20), (CPU, 16 << 20)])
def test_windows_of_a_gpu_are_large_enough_for_its_link(device: torch.device, nbytes: int) -> None:
    with ConstantFakeMode():
        weight = nn.Parameter(torch.empty(1 << 16, 1 << 16, device=device))
    assert OffloadedUpdate(torch.optim.SGD([weight])).window == nbytes
