"""A child process that trains models with weights in blocks while the second meter counts every step.

python -m tests.support.counted_blocks words bare    # one line of JSON for each step
"""

from __future__ import annotations

import gc
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial

import torch

import memgraph
from memgraph.optim import offloaded_update
from memgraph.profile.memory_meter import resident_bytes
from tests.support.allocator_meter import Allocator
from tests.support.block_models import Words, words
from tests.support.counted_steps import Counted, after_planning
from tests.support.smallest_budget import smallest_of

STEPS = 5  # measured, timed, planned again, and two more
MODELS: dict[str, Callable[[], Words]] = {"words": Words, "bare": partial(Words, bias=False)}


def main() -> None:
    """Train the models that the command line names."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    offloaded_update.SMALLEST = 1 << 16  # bytes of a window, so that weights are what needs most
    allocator = Allocator()
    after_planning(allocator.reset)
    for name in sys.argv[1:]:
        for row in counted(name, allocator):
            print(json.dumps(asdict(row)), flush=True)


def counted(name: str, allocator: Allocator) -> Iterator[Counted]:
    """Yield the steps of a model under a budget that only plans with blocks fit, the update included.

    The first one begins with all parameters on the device, as the caller has them.
    """
    gc.collect()
    model, batch = MODELS[name](), words()
    held = resident_bytes([*model.parameters(), *batch])
    elsewhere = allocator.now - held  # bytes of the process that are no part of the step
    adam = torch.optim.Adam(model.parameters())
    budget = smallest_of(lambda: memgraph.plan(model, *batch, budget=1, optimizer=adam, time_limit=1))
    compiled = memgraph.compile(model, int(1.02 * budget), optimizer=adam, time_limit=1)
    for step in range(STEPS):
        allocator.reset()
        loss = compiled(*batch)
        loss.backward()
        adam.step()
        most, report = allocator.most, compiled.plan
        assert report.row_blocks
        staging = int(report.forecast.by_kind["staging"].max(initial=0))
        yield Counted(name, 1.02, step, most - elsewhere + staging, report.measured, report.peak, report.budget)
        del loss
        adam.zero_grad()


if __name__ == "__main__":
    main()
