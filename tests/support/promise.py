"""Compare a model under a budget with eager: bit-equal gradients, and measured <= forecast <= budget.

    trial(case, 0.5)  ->  Trial(budget=..., forecast=..., measured=..., equal=True, ...)

A share is of eager's activation peak: the budget is parameters, buffers and batch, and that share of what eager holds
above them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import memgraph
from memgraph.profile.memory_meter import measure_peak, resident_bytes
from tests.support.zoo import Case, eager_peak, fresh

STEPS = 5  # of another signature, measured, timed, perhaps planned again and measured, and once measured by this file


@dataclass(frozen=True)
class Trial:
    """The results of a trial; bytes are of the whole device, times in microseconds."""

    budget: int
    eager: int
    forecast: int
    measured: int
    first: int | None  # as measured by the module in its first step
    equal: bool
    eager_us: float
    us: float
    planned_us: float
    recomputes: int
    offloads: int


@dataclass(frozen=True)
class Training:
    """Some steps: all values that must be equal, the peak of the last step, and its time."""

    facts: list[Tensor]
    peak: int
    us: float


def trial(case: Case, share: float, **wishes: Any) -> Trial:
    """Train under `share` of eager's activation peak.

    Raises:
        BudgetError: no plan was found.
    """
    eager = _eager(case)
    model, batch = fresh(case)
    there = resident_bytes([*model.parameters(), *model.buffers(), *tensors_of_batch(batch)])
    budget = there + int(share * eager_peak_of(case))
    planned = memgraph.compile(model, budget, loss=None if case.beside else case.loss, **wishes)
    ours = _train(model, lambda: case.loss(batch.of(planned)) if case.beside else batch.of(planned))
    report = planned.plan
    kinds = [type(decision).__name__ for decision in report.plan]
    held = resident_bytes([*model.parameters(), *model.buffers(), *tensors_of_batch(batch)])  # bytes on disk are not
    staging = int(report.forecast.by_kind["staging"].max(initial=0))
    return Trial(
        budget, there + eager_peak_of(case), report.peak, held + ours.peak + staging, report.measured,
        len(ours.facts) == len(eager.facts) and all(map(torch.equal, ours.facts, eager.facts)),
        eager.us, ours.us, report.planned_us, kinds.count("Recompute"), kinds.count("Offload"),
    )  # fmt: skip


@cache
def eager_peak_of(case: Case) -> int:
    return eager_peak(case)


@cache
def _eager(case: Case) -> Training:
    model, batch = fresh(case)
    return _train(model, lambda: case.loss(batch.of(model)))


def _train(model: nn.Module, loss_of: Callable[[], Tensor]) -> Training:
    """Train with AdamW from fixed seeds; measure forward and backward of the last step, without the optimizer."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    facts: list[Tensor] = []
    peak, us = 0, float("inf")
    for step in range(STEPS):
        torch.manual_seed(step)
        if step == STEPS - 1:
            _, allocated = measure_peak(lambda: loss_of().backward())
            assert allocated is not None
            peak = allocated.peak
        else:
            begin = time.perf_counter()
            loss = loss_of()
            loss.backward()
            us = min(us, (time.perf_counter() - begin) * 1e6)  # one of the steps may be planned again or metered
            facts.append(loss.detach())
        facts += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return Training([*facts, *(p.detach() for p in model.parameters()), *model.buffers()], peak, us)


def tensors_of_batch(batch: Any) -> list[Tensor]:
    """Return the tensors that a model is called with."""
    return [leaf for leaf in tree_leaves((batch.args, dict(batch.kwargs))) if isinstance(leaf, Tensor)]
