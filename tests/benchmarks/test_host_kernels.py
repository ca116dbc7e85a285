"""A described device whose ops the host computes: its results, draws and graphs, and planned steps on it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.fake_cuda, pytest.mark.usefixtures("described")]
CASES = ("attention", "norms", "half", "offload", "far_home", "recording")
RESULTS = """
import torch
from torch import nn
from torch.nn import functional as F

def close(found, expected, share):
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine.cpu().float() - theirs).norm() <= share * theirs.norm(), (mine, theirs)

def gradients(make, x, device):
    torch.manual_seed(0)
    model = make().to(device)
    model(x.to(device)).square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]

x = torch.linspace(-1, 1, 2 * 8 * 96).view(2, 8, 96)
for make in (
    lambda: nn.Sequential(nn.Linear(96, 64), nn.GELU(), nn.LayerNorm(64), nn.RMSNorm(64), nn.Linear(64, 8), nn.Softmax(-1)),
    lambda: nn.Sequential(nn.Conv1d(8, 4, 3), nn.BatchNorm1d(4), nn.Conv1d(4, 4, 3)),
):
    close(gradients(make, x, "cuda"), gradients(make, x, "cpu"), 1e-5)

def recurrent(kind, device, packed):
    torch.manual_seed(0)
    layers = kind(96, 32, 2, batch_first=True, bidirectional=True).to(device)
    there = x.detach().clone().to(device).requires_grad_()
    given = nn.utils.rnn.pack_padded_sequence(there, torch.tensor([8, 5]), batch_first=True) if packed else there
    result = layers(given)[0]
    (result.data if packed else result).square().sum().backward()
    return [there.grad, *(parameter.grad for parameter in layers.parameters())]

for kind in (nn.LSTM, nn.GRU, nn.RNN):
    for packed in (False, True):
        close(recurrent(kind, "cuda", packed), recurrent(kind, "cpu", packed), 1e-5)

def cells(device):
    torch.manual_seed(0)
    cell = nn.LSTMCell(96, 32).to(device)
    hidden, memory = cell(x[0].to(device))
    hidden, memory = cell(x[1].to(device), (hidden, memory))
    (hidden * memory).square().sum().backward()
    return [parameter.grad for parameter in cell.parameters()]

close(cells("cuda"), cells("cpu"), 1e-5)

def ctc(device):
    logits = torch.linspace(-1, 1, 60).view(6, 2, 5).to(device).requires_grad_()
    lengths = torch.tensor([6, 5]), torch.tensor([2, 1])
    F.ctc_loss(logits.log_softmax(-1), torch.tensor([[1, 2], [3, 4]], device=device), *lengths).backward()
    return [logits.grad]

close(ctc("cuda"), ctc("cpu"), 1e-5)

def attention(device, dtype, mask):
    torch.manual_seed(0)
    tensors = [torch.randn(2, heads, 24, 32).to(device, dtype).requires_grad_() for heads in (4, 2, 2)]
    mask = mask if mask is None else mask.to(device, dtype)
    result = F.scaled_dot_product_attention(*tensors, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
    result.float().square().sum().backward()
    names.add(type(result.grad_fn).__name__)
    return [result.detach(), *(tensor.grad for tensor in tensors)]

names = set()
for mask in (None, torch.linspace(-2, 2, 24 * 24).view(24, 24)):
    for dtype in (torch.float32, torch.bfloat16):
        close(attention("cuda", dtype, mask), attention("cpu", torch.float32, mask), 1e-5 if dtype is torch.float32 else 1e-2)

truths = torch.ones(2, 3, 4, 5, dtype=torch.bool).to(memory_format=torch.channels_last)
for op in (torch.logical_and, torch.bitwise_and, torch.maximum):
    assert op(truths.cuda(), truths.cuda()).stride() == op(truths, truths).stride() == truths.stride()
print(*sorted(names))
"""
DRAWS = """
import torch
x = torch.ones(1000, device="cuda")
torch.manual_seed(3)
state = torch.cuda.get_rng_state()
first, second = torch.dropout(x, 0.5, True), torch.dropout(x, 0.5, True)
assert not torch.equal(first, second) and 400 < (first > 0).sum() < 600
torch.cuda.set_rng_state(state)
assert torch.equal(torch.dropout(x, 0.5, True), first) and torch.equal(torch.dropout(x, 0.5, True), second)

graph = torch.cuda.CUDAGraph()
y = torch.full((4,), 2.0, device="cuda")
with torch.cuda.graph(graph):
    z = torch.dropout(x, 0.5, True)
    y.mul_(2)
    w = y + 1
assert y.tolist() == [2.0] * 4  # what is captured has not run
torch.cuda.set_rng_state(state)
for expected, drawn in ((4.0, first), (8.0, second)):
    graph.replay()
    assert y.tolist() == [expected] * 4 and w.tolist() == [expected + 1] * 4 and torch.equal(z, drawn)
y.fill_(1.0)
graph.replay()
assert w.tolist() == [3.0] * 4

spoiled = torch.cuda.CUDAGraph()
try:
    with torch.cuda.graph(spoiled):
        y.sum().item()
except RuntimeError as error:
    print(type(error).__name__)
"""
SHAPES = """
import torch
small = torch.arange(100.0, device="cuda")
assert (small + 1).sum() == 5050
wide = torch.randn(1 << 15, 1 << 15, device="cuda")  # 4 GB: no product of these ends in a test
before = torch.cuda.memory_allocated()
product = (wide @ wide).add_(1)[:1]
print(product.shape[1], (torch.cuda.memory_allocated() - before - wide.nbytes) >> 20)
"""
PLANNED = """
import torch
from torch import nn
import memgraph
from tests.support.cuda_meter import CudaAllocator

torch.manual_seed(0)
torch.cuda.init()
allocator = CudaAllocator()
layers = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
model, x = nn.Sequential(*layers).cuda(), torch.randn(512, 64, device="cuda")
compiled = memgraph.compile(model, 71_500_000, lower=None)
for _ in range(4):
    compiled(x).sum().backward()
    model.zero_grad()
assert compiled.plan.machine.link.out > 0, "no link was measured"
print(70_000_000 < allocator.most <= 71_500_000)
"""
PART = """
import torch
from torch import nn
import memgraph
from memgraph.opaque import part
from tests.support.cuda_meter import CudaAllocator

class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.LSTM(64, 64, batch_first=True, bidirectional=True)

    def forward(self, x):
        given = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([8, 5]), batch_first=True)
        return self.layers(given)[1][0]

simulated, grown = part.backward_peak, []

def watched(*args, **kwargs):
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = simulated(*args, **kwargs)
    grown.append(torch.cuda.max_memory_allocated() - before)
    return found

part.backward_peak = watched
torch.manual_seed(0)
torch.cuda.init()
allocator = CudaAllocator()
compiled = memgraph.compile(nn.Sequential(Packed(), nn.Tanh()).cuda(), "1GB", loss=lambda y: y.square().mean())
for _ in range(3):
    compiled(torch.randn(2, 8, 64, device="cuda")).backward()
    compiled.zero_grad()
print(compiled.plan.opaque[0].path, compiled.plan.measured <= compiled.plan.peak, allocator.most <= compiled.plan.peak)
print(len(grown) > 0 and max(grown))
"""
WORKSPACES = """
import torch
from memgraph.profile.library_workspaces import libraries_nbytes
device = torch.device("cuda", 0)
both = [torch.empty(50 << 20, dtype=torch.uint8, device=device) for _ in range(2)]
del both
assert torch.cuda.memory_reserved() >= 100 << 20
nbytes = libraries_nbytes(device)
large = [each for each in torch.cuda.memory._snapshot()["segments"] if each["segment_type"] == "large"]
print(nbytes >> 20, [each["total_size"] >> 20 for each in large])
"""


def run(*arguments: str) -> str:
    """Run a module on a device whose ops the host computes, and return what it prints."""
    command = [sys.executable, "-m", "benchmarks.fake_cuda.host_kernels", *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.parametrize("case", CASES)
def test_a_small_training_has_eagers_bits_and_keeps_its_budget(case: str) -> None:
    assert run("benchmarks.smoke_cases", case, "cuda").endswith("bits as eager's\n")


def test_results_are_those_of_the_host() -> None:
    cudnn, efficient, _ = run("-c", RESULTS).split()
    assert (cudnn, efficient) == (
        "ScaledDotProductCudnnAttentionBackward0", "ScaledDotProductEfficientAttentionBackward0",
    )  # fmt: skip


def test_draws_follow_the_generator_and_graphs_run_when_they_are_launched() -> None:
    assert run("-c", DRAWS) == "AcceleratorError\n"


def test_large_results_are_allocated_and_not_computed_where_only_shapes_are_wanted() -> None:
    assert run("--shapes", "-c", SHAPES) == "32768 34\n"  # with a workspace, in a block of 34 MiB


def test_a_part_that_runs_as_it_is_is_measured_without_what_an_earlier_backward_still_holds() -> None:
    assert run("-c", PART) == "0 True True\n0\n"


def test_workspaces_of_libraries_have_segments_of_their_size() -> None:
    assert run("-c", WORKSPACES) == "66 [34, 34]\n"


def test_a_first_call_that_measures_the_link_is_within_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMGRAPH_CACHE", str(tmp_path))
    assert run("-c", PLANNED) == "True\n"
