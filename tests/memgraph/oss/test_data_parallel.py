"""A compiled module in a process group: gradients are added in place, and DistributedDataParallel averages them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import memgraph
from tests.support.ranks import on_ranks

ROOM = 1 << 30
WRAPPERS: list[dict[str, Any]] = [
    {"find_unused_parameters": True},
    {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    {"find_unused_parameters": True, "bucket_cap_mb": 0.001},
    {"static_graph": True},
]


class Branches(nn.Module):
    """A module that reads one of two layers in each call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.left, self.right = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor, left: bool) -> Tensor:
        return (self.left if left else self.right)(self.first(x).tanh()).square().mean()


def trained(rank: int, compiled: bool, options: dict[str, Any], compress: bool) -> list[Tensor | None]:
    """Gradients and parameters of some steps, of three backwards each where the wrapper takes that."""
    net = Branches()
    static = "static_graph" in options
    net.right.requires_grad_(not static)
    model = DistributedDataParallel(memgraph.compile(net, ROOM) if compiled else net, **options)
    if compress:
        model.register_comm_hook(None, fp16_compress_hook)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    found: list[Tensor | None] = []
    for step in range(4):
        left = static or step % 2 == 0
        for _ in range(0 if static else 2):
            with model.no_sync():
                model(torch.randn(5, 16, generator=generator), left).backward()
        model(torch.randn(5, 16, generator=generator), left).backward()
        found += [None if p.grad is None else p.grad.clone() for p in net.parameters()]
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 3 != 0)
    return [*found, *(p.detach() for p in net.parameters())]


def _differing(rank: int) -> list[str]:
    wrong = []
    for options in WRAPPERS:
        for compress in (False, True):
            theirs, ours = (trained(rank, compiled, options, compress) for compiled in (False, True))
            pairs = zip(theirs, ours, strict=True)
            same = all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs)
            wrong += [f"{options} {compress}"] * (not same)
    return wrong


@pytest.mark.long
def test_data_parallel_wrappers_average_what_was_put_into_grad() -> None:
    assert on_ranks(2, _differing) == [[], []]


def test_a_process_group_makes_no_second_set_of_gradients() -> None:
    outside = second_step()
    with process_group():
        inside = second_step()
    assert inside.measured == outside.measured
    assert inside.peak == outside.peak


def second_step() -> memgraph.Report:
    """The report of a step that adds to gradients, which are most of it."""
    torch.manual_seed(0)
    compiled = memgraph.compile(nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))), ROOM)
    for _ in range(2):
        compiled(torch.ones(2, 64)).square().sum().backward()
    return compiled.plan


@contextmanager
def process_group() -> Iterator[None]:
    """Open a process group of this process alone."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", f"file://{Path(folder) / 'meet'}", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()
