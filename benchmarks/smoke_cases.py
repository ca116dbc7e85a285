"""The smoke cases: each trains a small model on a GPU under the smallest budget, beside eager.

    python -m benchmarks.smoke_cases norms cuda   ->   1.2 MB measured of 1.3 forecast, bits as eager's

Losses, parameters and buffers after some steps must be eager's, and measured <= forecast <= budget.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memgraph
from memgraph.planning import search
from memgraph.report.report import Report
from passes import Stream
from passes.schedule.schedule import Placement
from tests.support.forced_plans import given_up

STEPS = 4
WIDTH = 128
SEARCH = 1.0  # seconds for a plan, good or not


class WrongError(Exception):
    """A property that does not hold in a case."""


class Attention(nn.Module):
    """Blocks of attention with dropout, as GPT2's and BERT's have it in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for qkv, out in zip(self.qkv, self.out, strict=True):
            q, k, v = qkv(x).unflatten(-1, (3, 4, WIDTH // 4)).permute(2, 0, 3, 1, 4)
            x = x + out(
                F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True).transpose(1, 2).flatten(2)
            )
        return x.float().square().mean()


class Norms(nn.Module):
    """Convolutions with batch norms, whose running statistics are buffers."""

    def __init__(self) -> None:
        super().__init__()
        parts = [(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(4)]
        self.body = nn.Sequential(*(part for group in parts for part in group))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).square().mean()


class Layers(nn.Module):
    """Linear layers with state and activations that are large enough to offload."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(part for _ in range(6) for part in (nn.Linear(512, 512), nn.GELU())))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).square().mean()


def attention(device: torch.device) -> str:
    """float32 attention with dropout: its backward reads its seeds on the host."""
    return _least(Attention, torch.randn(4, 128, WIDTH), device)


def norms(device: torch.device) -> str:
    """Batch norms: their running statistics are updated once, whatever is recomputed."""
    return _least(Norms, torch.randn(8, 8, 32, 32), device)


def offload(device: torch.device) -> str:
    """Every activation is offloaded to pinned memory and reloaded."""
    with mock.patch.object(search, "make_plan", given_up(Placement.OFFLOAD_BLOCKING)):
        text, report = _compared(Layers, torch.randn(1024, 512), device, 8 << 30)
    if not any(op.fn.startswith("memgraph.offload") for op in report.forecast.trace.ops):
        raise WrongError(f"nothing was sent away; {text}")
    return text


def half(device: torch.device) -> str:
    """bfloat16 attention of cuDNN or flash, whose backward is not deterministic."""
    return _least(lambda: Attention().bfloat16(), torch.randn(4, 128, WIDTH).bfloat16(), device, close=2e-2)


def far_home(device: torch.device) -> str:
    """Parameters and optimizer states are offloaded, and updated in windows."""
    return _least(Layers, torch.randn(64, 512), device, state=True)


def recording(device: torch.device) -> str:
    """A step as CUDA graphs, recorded and replayed."""
    text, _ = _compared(Attention, torch.randn(4, 128, WIDTH), device, 8 << 30, cuda_graphs=True)
    return text


def _least(
    make: Callable[[], nn.Module], x: Tensor, device: torch.device, state: bool = False, close: float = 0
) -> str:
    """Train under little more than the smallest budget; with `state`, some of the state must be offloaded."""
    model = make().to(device)
    options: dict[str, Any] = {"optimizer": torch.optim.AdamW(model.parameters())} if state else {}
    try:
        memgraph.plan(model, x.to(device), budget=1, lower=None, time_limit=SEARCH, **options)
        raise WrongError("a budget of one byte is enough")
    except memgraph.BudgetError as error:
        budget = int(error.smallest * 1.05)
    text, report = _compared(make, x, device, budget, state, close)
    if state and not any(isinstance(decision, Stream) for decision in report.plan):
        raise WrongError(f"no state is offloaded; {text}")
    return text


def _compared(
    make: Callable[[], nn.Module], x: Tensor, device: torch.device, budget: int, state: bool = False,
    close: float = 0, **options: Any,
) -> tuple[str, Report]:  # fmt: skip
    """Compare a few steps with eager's.

    Raises:
        WrongError: a property does not hold.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    expected, _ = _trained(make, x.to(device), None, state, {})
    found, report = _trained(make, x.to(device), budget, state, options)
    assert report is not None
    text = f"{(report.measured or 0) / 1e6:.2f} MB measured of {report.peak / 1e6:.2f} forecast"
    if report.measured is None or not report.measured <= report.peak <= report.budget:
        raise WrongError(f"{text}, of a budget of {report.budget}")
    if all(map(torch.equal, found, expected)):
        return f"{text}, bits as eager's", report
    most = max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))
    if not most <= close:
        raise WrongError(f"{text}, but results differ from eager's by up to {most:.3g}")
    return f"{text}, within {most:.1g} of eager's", report


def _trained(
    make: Callable[[], nn.Module], x: Tensor, budget: int | None, state: bool, options: dict[str, Any]
) -> tuple[list[Tensor], Report | None]:
    """Return losses, final parameters and buffers on the host, and the plan, if there is a budget."""
    torch.manual_seed(0)
    model = make().to(x.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if state and budget is not None:
        options = {**options, "optimizer": optimizer}
    called = model if budget is None else memgraph.compile(model, budget, lower=None, time_limit=SEARCH, **options)
    losses = []
    for seed in range(STEPS):
        torch.manual_seed(seed)
        loss = called(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    facts = [value.detach().double().cpu() for value in (*losses, *model.parameters(), *model.buffers())]
    return facts, called.plan if isinstance(called, memgraph.CompiledModule) else None


if __name__ == "__main__":
    _, case, where = sys.argv
    if where == "cuda" and not torch.cuda.is_available():
        sys.exit("there is no CUDA device here: give cpu in its place")
    print(globals()[case](torch.device(where, 0) if where == "cuda" else torch.device(where)))
