"""Train a model of 7B parameters with AdamW (bf16 weights, fp32 states), under a budget below its weights.

    rows(SIZE, laps, 3, left, report)   ->   Row("7b", "host-offload rule", ...), Row("7b", "memgraph", ..., 16 GB), ...

The rule beside it is `hosted.py`.  Each row has tokens a second, and the share of the device's best flop rate.
Recomputed operations are not counted.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memgraph
from benchmarks.blocks import LlamaBlock, Shape, default_dtype
from benchmarks.contenders import Row, plan_of, tried
from benchmarks.hosted import Hosted
from benchmarks.laps import Laps, Taken
from benchmarks.wide import WideAdamW

SEARCH = 20.0  # seconds for a plan
WARM = 6  # steps before any is timed: planned, measured and timed, twice; noted for an arena
RULE = "host-offload rule"
TOY = 35 * 10**5  # bytes: less than the states of the toy
PINNED = 0.85  # of the host's memory may be pinned: weights and states are more than half of a usual one


@dataclass(frozen=True)
class Size:
    """The sizes of a language model and its batch, and its budgets."""

    name: str
    shape: Shape
    vocabulary: int
    budgets: tuple[int, ...]

    def toy(self) -> Size:
        """Return sizes that are small enough for a CPU and some seconds."""
        return replace(
            self, shape=replace(self.shape.toy(), blocks=1, width=256, inner=256), vocabulary=64, budgets=(TOY,)
        )

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the rows, the largest budget first."""
        first, *others = (f"{self.name}-{budget // 10**9}GB" for budget in self.budgets)
        return (first, f"{self.name}-rule", *others)

    @property
    def tokens(self) -> int:
        return self.shape.batch * self.shape.length


SEVEN = Size(
    "7b", Shape(blocks=32, width=4096, heads=32, length=2048, batch=4, inner=11008), 32000, (16 * 10**9, 8 * 10**9)
)


class Whole(nn.Module):
    """A language model that takes tokens and targets, and returns the mean loss."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.shape.width
        self.token = nn.Embedding(size.vocabulary, width)
        self.blocks = nn.ModuleList(LlamaBlock(size.shape) for _ in range(size.shape.blocks))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, size.vocabulary, bias=False)

    def forward(self, now: Tensor, then: Tensor) -> Tensor:
        x = self.token(now)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), then.flatten())


def rows(
    size: Size, laps: Laps, count: int, left: Callable[[], float], parts: Collection[str] | None = None
) -> Iterator[Row]:
    """Yield each row of `parts` when it is measured, until no seconds are `left`.

    On a GPU each wants a process of its own, for the weights of two don't fit the memory that a host can pin.
    """
    best = matmul_flops(laps)
    ways = [(Row(size.name, "memgraph", budget=budget), _ours) for budget in size.budgets]
    ways.insert(1, (Row(size.name, RULE), _rule))
    chosen = (way for part, way in zip(size.parts, ways, strict=True) if parts is None or part in parts)
    for row, way in chosen:
        found = tried(partial(way, row, size, laps, count), row, left)
        laps.clear()
        yield _rated(found, size, best)


def flops(size: Size) -> float:
    """Return the operations of a step, without recomputation.

    Each weight of a matrix product takes two for each token in forward, and four in backward. Attention is causal.
    """
    shape = size.shape
    keys = shape.width // shape.shared
    weights = shape.blocks * (2 * shape.width * (shape.width + keys) + 3 * shape.width * shape.inner)
    attention = shape.blocks * shape.length * shape.width  # two products over half of the places before
    return 6.0 * size.tokens * (weights + size.vocabulary * shape.width + attention)


def matmul_flops(laps: Laps) -> float:
    """Return the best rate of a few large matrix products in bf16, in operations a second."""
    width = 8192 if laps.device.type == "cuda" else 256
    a, b = (torch.randn(width, width, device=laps.device).to(torch.bfloat16) for _ in range(2))
    return 2e3 * width**3 / min(laps.ms(lambda: a @ b) for _ in range(5))


def made(size: Size, device: torch.device) -> tuple[Whole, tuple[Tensor, Tensor]]:
    """Return the model in bf16, and a batch."""
    torch.manual_seed(0)
    with torch.device(device), default_dtype(torch.bfloat16):
        model = Whole(size)
        tokens = torch.randint(size.vocabulary, (size.shape.batch, size.shape.length + 1))
    return model, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def _ours(row: Row, size: Size, laps: Laps, count: int) -> Row:
    model, batch = made(size, laps.device)
    optimizer = WideAdamW(model.parameters())
    step = memgraph.compile(
        model, row.budget, optimizer=optimizer, fuse_update=True, host=PINNED, time_limit=SEARCH, lower=None
    )

    def train() -> None:
        step(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    taken = _taken(train, laps, count, [*batch])
    report = step.plan
    if laps.device.type != "cuda" and report.measured is not None:  # there, offloaded state is on disk, and no memory
        taken = replace(taken, peak=report.measured)
    return replace(row, taken=taken, why=plan_of(report))


def _rule(row: Row, size: Size, laps: Laps, count: int) -> Row:
    model, batch = made(size, laps.device)
    hosted = Hosted(model, [model.token, *model.blocks, nn.ModuleList([model.norm, model.head])], laps.device)
    try:
        return replace(row, taken=_taken(lambda: hosted.step(*batch), laps, count, [*batch]))
    finally:
        hosted.close()


def _taken(step: Callable[[], Any], laps: Laps, count: int, there: list[Tensor]) -> Taken:
    for _ in range(WARM):
        step()
    gc.collect()
    return laps.of(step, count, there)


def _rated(row: Row, size: Size, best: float) -> Row:
    if row.taken is None:
        return row
    seconds = row.taken.spread[1] / 1e3
    return replace(row, tokens=size.tokens / seconds, share=flops(size) / seconds / best)
