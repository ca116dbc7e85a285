"""A described device whose ops the host computes: its results, draws and graphs, and planned steps on it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.fake_cuda.described_device import is_described

pytestmark = pytest.mark.fake_cuda
CASES = ("attention", "norms", "half", "offload", "far_home", "recording")
RESULTS = """
import torch
from torch import nn
from torch.nn import functional as F

class Attention(nn.Module):
    def forward(self, x):
        q, k, v = x.unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

def gradients(make, x, device, dtype=torch.float32):
    torch.manual_seed(0)
    model = make().to(device, dtype)
    model(x.to(device, dtype)).float().square().mean().backward()
    return [parameter.grad.float().cpu() for parameter in model.parameters()]

wide = torch.linspace(-1, 1, 2 * 8 * 96).view(2, 8, 96)
nets = {
    "linear": (lambda: nn.Sequential(nn.Linear(96, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8)), wide),
    "attention": (lambda: nn.Sequential(nn.Linear(96, 96), Attention(), nn.RMSNorm(32), nn.Linear(32, 8)), wide),
    "norm": (lambda: nn.Sequential(nn.Conv1d(8, 4, 3), nn.BatchNorm1d(4), nn.Conv1d(4, 4, 3)), wide),
    "embedding": (lambda: nn.Sequential(nn.Linear(96, 8), nn.Softmax(-1)), wide),
}
for name, (make, x) in nets.items():
    for dtype, close in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
        found, expected = (gradients(make, x, device, dtype) for device in ("cuda", "cpu"))
        for mine, theirs in zip(found, expected, strict=True):
            assert (mine - theirs).norm() <= close * theirs.norm(), (name, dtype)
print("equal")
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


@pytest.fixture(autouse=True)
def described() -> None:
    if not is_described():
        pytest.fail("run these with `make fake-cuda`, which describes a device")


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
    assert run("-c", RESULTS) == "equal\n"


def test_draws_follow_the_generator_and_graphs_run_when_they_are_launched() -> None:
    assert run("-c", DRAWS) == "AcceleratorError\n"
