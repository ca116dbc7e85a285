"""A child process that trains random modules while the second meter counts every step.

    python -m tests.support.counted_modules 0 50    # seeds from 0 to 49: one line of JSON for each step

Modules that are called twice before backward are not counted, because each call has its own budget.
"""

from __future__ import annotations

import gc
import json
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

import memgraph
from memgraph.profile.memory_meter import resident_bytes
from tests.support.allocator_meter import Allocator
from tests.support.beside_eager import SECONDS, STEPS, TRIES, budget_of, loss_of
from tests.support.counted_steps import after_planning
from tests.support.random_modules import random_module


@dataclass(frozen=True)
class CountedStep:
    """One step of the module of a seed; bytes are of the whole device."""

    seed: int
    step: int
    counted: int  # by the second meter
    forecast: int
    budget: int
    beyond: str  # the part of the loop that no plan counts


def main() -> None:
    """Train the modules of a range of seeds."""
    first, last = map(int, sys.argv[1:])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    gc.freeze()
    allocator = Allocator()
    after_planning(allocator.reset)
    for seed in range(first, last):
        if random_module(seed).loop != "called twice":
            for row in counted(seed, allocator):
                print(json.dumps(asdict(row)), flush=True)


def counted(seed: int, allocator: Allocator) -> list[CountedStep]:
    """Return the steps of a seed's module, under the first budget that is enough of those that errors give."""
    module = random_module(seed)
    budget = budget_of(module)
    for _ in range(TRIES):
        model, inputs = module.made()
        compiled = memgraph.compile(model, budget, offload=None, time_limit=SECONDS)
        try:
            return _steps(seed, compiled, inputs, module.loop, allocator)
        except memgraph.BudgetError as error:
            budget = error.smallest
    raise AssertionError(f"seed {seed}: no budget that an error gave was enough")


def _steps(
    seed: int, model: memgraph.CompiledModule, inputs: Sequence[Tensor], loop: str, allocator: Allocator
) -> list[CountedStep]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rows = []
    for step in range(STEPS):
        gc.collect()  # otherwise old garbage would be freed during the step
        x = inputs[step].clone().requires_grad_(loop == "input gradients")
        elsewhere = allocator.now - resident_bytes([*_held(model), x])  # no part of the step
        allocator.reset()
        result = model(x)
        loss_of(result).backward()
        most, report = allocator.most, model.plan
        rows.append(CountedStep(seed, step, most - elsewhere, report.peak, report.budget, report.beyond))
        del result
        if loop == "accumulates" and step == 0:
            continue
        optimizer.step()
        optimizer.zero_grad()
    return rows


def _held(model: nn.Module) -> list[Tensor]:
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [*model.parameters(), *model.buffers(), *gradients]


if __name__ == "__main__":
    main()
