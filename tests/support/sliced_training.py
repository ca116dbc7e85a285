"""A loop with a module in slices beside the plain one: bits of results, near gradients, bytes of the plan.

beside_eager(headed(), slices={"head": 4})   ->   the compiled module, after both have run and were compared
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import memgraph
from memgraph.profile.memory_meter import measure_peak, resident_bytes
from tests.support.sliced_models import Headed, cross_entropy, tokens

NEAR = 2e-6  # of the largest element of a gradient
SHARE = 0.5  # of what eager holds above parameters and batch; without slices no plan fits
BATCH, LENGTH = 4, 64  # 256 rows
ROOM = 10**9
Run = Callable[[Any], Any]


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return tokens and labels, some of them ignored; each seed has others."""
    first, second = tokens(BATCH, LENGTH)
    return first.roll(seed), second


def headed(loss: Any = cross_entropy, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return Headed(loss, **options)


def loss_of(result: Any) -> Tensor:
    return result if isinstance(result, Tensor) else result["loss"]


def step(model: Any) -> Tensor:
    torch.manual_seed(1)
    loss = loss_of(model(*batch()))
    loss.backward()
    return loss.detach()


def backward_twice(model: Any) -> Tensor:
    loss = model(*batch())
    (loss * 3.0).backward(retain_graph=True)
    (loss * 0.25).backward()
    return loss.detach()


def budget_of(module: nn.Module, share: float = SHARE, run: Run = step) -> int:
    """Return the bytes of parameters and batch, and a share of what eager's step holds above them."""
    eager = copy.deepcopy(module)
    _, allocated = measure_peak(lambda: run(eager))
    assert allocated is not None
    return resident_bytes([*module.parameters(), *module.buffers(), *batch()]) + int(share * allocated.peak)


def assert_near(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is not None and other.grad is not None:
            assert float((one.grad - other.grad).abs().max()) <= NEAR * float(other.grad.abs().max()), name


def assert_kept(model: memgraph.CompiledModule) -> None:
    """Check that the budget was kept, and that the step ran in slices."""
    report = model.plan
    assert report.slices
    assert report.measured is not None and report.measured <= report.peak <= report.budget


def beside_eager(
    module: nn.Module, run: Run = step, budget: int | None = None, **wishes: Any
) -> memgraph.CompiledModule:
    """Run a loop with a module in slices and with the plain one; compare its results, bit by bit, and the gradients."""
    eager = copy.deepcopy(module)
    asked = {"slices": "auto", "offload": None} | wishes
    model = memgraph.compile(module, budget_of(module) if budget is None else budget, **asked)
    ours, theirs = run(model), run(eager)
    assert torch.equal(ours, theirs)
    assert_near(module, eager)
    return model
