"""Compare what torch's allocator holds for a step in its arena with what it holds outside, and what each takes.

    rows(cuda, SHAPES)   ->   Figure("llama-8b at 25%, in the arena: reserved over allocated", 8.3, "%"), ...

Budgets are shares of eager's activations, or the smallest that works. Outside, the same step runs with the arena
switched off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from statistics import median
from unittest import mock

import torch
from torch import Tensor, nn

import memgraph
from benchmarks.beside import Figure
from benchmarks.blocks import Shape, stack
from benchmarks.clock import step_of
from benchmarks.contenders import settle, stack_nbytes
from benchmarks.laps import Laps
from memgraph.runtime.arena import StepArena

SHARES = (0.5, 0.25)
LAPS = 16
SEARCH = 8.0  # seconds for a plan


def rows(device: torch.device, shapes: Mapping[str, Shape], laps: int = LAPS) -> Iterator[Figure]:
    """Measure stacks of blocks under each share, in the arena and outside."""
    for name, shape in shapes.items():
        for share in SHARES:
            yield from _step(f"{name} at {share:.0%}", shape, share, Laps(device), laps)


def _step(name: str, shape: Shape, share: float, laps: Laps, count: int) -> Iterator[Figure]:
    laps.clear()
    model, x = stack(shape, laps.device)
    plain = step_of(model, lambda: model(x))
    plain()
    there = [*model.parameters(), *model.buffers(), x]
    given = stack_nbytes(shape)
    budget = given + int(share * (laps.bytes(plain, there)[0] - given))
    try:
        ours, step = _settled(model, x, budget)
    except memgraph.BudgetError as error:
        ours, step = _settled(model, x, error.smallest)
    yield from _figures(f"{name}, {ours.plan.arena or 'outside an arena'}", step, laps, count)
    with mock.patch.object(StepArena, "begin", lambda arena: None):
        step()
        yield from _figures(f"{name}, outside", step, laps, count)


def _settled(model: nn.Module, x: Tensor, budget: int) -> tuple[memgraph.CompiledModule, Callable[[], object]]:
    """Return the model under a budget, and its step, whose plan is final."""
    ours = memgraph.compile(model, budget, time_limit=SEARCH)
    step = step_of(model, lambda: ours(x))
    settle(ours, step)
    return ours, step


def _figures(name: str, step: Callable[[], object], laps: Laps, count: int) -> Iterator[Figure]:
    allocated, reserved = laps.bytes(step, ())
    yield Figure(f"{name}: allocated", allocated / 1e6, "MB")
    yield Figure(f"{name}: reserved over allocated", 100 * (reserved / max(1, allocated) - 1), "%")
    yield Figure(f"{name}: a step", median(laps.ms(step) for _ in range(count)), "ms")
