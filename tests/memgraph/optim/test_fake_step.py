"""Steps on fakes take what real ones take, so that measuring an update keeps the budget as well."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from memgraph.optim.optimizer_profiler import OptimizerProfiler
from memgraph.optim.parameter_kind import kinds_of, stepped_parameters
from tests.support.allocator_meter import compiler, preloaded
from tests.support.optimizers import OPTIMIZERS

FIRST_CALL = """
import torch, memgraph
from torch import nn
from tests.support.allocator_meter import Allocator
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(80_000, 64), nn.Linear(64, 64))  # 20.5 MB, and again for the gradient
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
compiled = memgraph.compile(model, 45_000_000, optimizer=optimizer, offload="disk")
meter = Allocator()
held = sum(p.nbytes for p in model.parameters())
for _ in range(2):
    meter.reset()
    compiled(torch.arange(512).view(4, 128)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    print(held + meter.most)
"""


@pytest.mark.long
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fakes_of_large_parameters_take_what_these_take(name: str) -> None:
    parameters = [nn.Parameter(torch.ones(512, 400)), nn.Parameter(torch.ones(300_000))]
    profiler = OptimizerProfiler(optimizer := OPTIMIZERS[name](parameters))
    matrix, vector = kinds_of(stepped_parameters(optimizer))
    for kinds in ((matrix,), (vector,), (matrix, vector)):
        if name == "Adafactor":  # it takes norms, whose kernels take more than their results
            assert profiler._fake_nbytes(kinds) is None
        else:
            assert profiler._fake_nbytes(kinds) == profiler._real_nbytes(kinds)


def test_an_optimizer_that_copies_values_to_the_host_steps_on_real_parameters() -> None:
    class Halving(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.copy_(torch.from_numpy(p.detach().numpy() / 2))

    profiler = OptimizerProfiler(optimizer := Halving([nn.Parameter(torch.ones(512, 400))], lr=0.1))
    kinds = tuple(kinds_of(stepped_parameters(optimizer)))
    assert profiler._fake_nbytes(kinds) is None
    assert profiler.update_workspace(*kinds) >= 0


def test_an_optimizer_whose_fakes_tell_too_little_steps_on_real_parameters() -> None:
    class Sorting(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    kept: Tensor = p.grad.flatten().unique()  # whose temporaries no fake shows
                    p.data.sub_(kept[0])

    profiler = OptimizerProfiler(optimizer := Sorting([nn.Parameter(torch.ones(512, 400))], lr=0.1))
    kinds = tuple(kinds_of(stepped_parameters(optimizer)))
    assert profiler._fake_nbytes(kinds) is None
    assert profiler.update_workspace(*kinds) > 512 * 400 * 4


@pytest.mark.long
@pytest.mark.skipif(
    sys.platform != "linux" or compiler() is None, reason="the second meter is a library of C that stands before glibc"
)
def test_the_first_call_with_an_optimizer_is_within_the_budget(tmp_path: Path) -> None:
    env = preloaded(tmp_path) | {"MEMGRAPH_CACHE": str(tmp_path / "cache")}
    ended = subprocess.run([sys.executable, "-c", FIRST_CALL], env=env, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    first, second = map(int, ended.stdout.split())
    assert max(first, second) <= 45_000_000
