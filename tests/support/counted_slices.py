"""A child process that trains models in slices while the second meter counts every step.

python -m tests.support.counted_slices "z-loss:0.5" "two heads:0.45"    # one line of JSON for each step
"""

from __future__ import annotations

import gc
import json
import sys
import warnings
from collections.abc import Iterator
from dataclasses import asdict

import torch

import memgraph
from memgraph.profile.memory_meter import measure_peak, resident_bytes
from tests.support.allocator_meter import Allocator
from tests.support.counted_steps import Counted, after_planning
from tests.support.sliced_models import made, tokens

STEPS = 4  # measured, timed, perhaps planned again, and one more
BATCH, LENGTH = 4, 64


def main() -> None:
    """Train the models that the command line names."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    allocator = Allocator()
    after_planning(allocator.reset)
    for name, share in (pair.split(":") for pair in sys.argv[1:]):
        for row in counted(name, float(share), allocator):
            print(json.dumps(asdict(row)), flush=True)


def counted(name: str, share: float, allocator: Allocator) -> Iterator[Counted]:
    """Yield the steps of a model in slices under a share of eager's activation peak."""
    gc.collect()
    model = made(name)[0]
    first, second = tokens(BATCH, LENGTH)
    batch = first, second.clamp(min=0)
    _, allocated = measure_peak(lambda: made(name)[0](*batch).backward())
    assert allocated is not None
    gc.collect()
    held = resident_bytes([*model.parameters(), *model.buffers(), *batch])
    elsewhere = allocator.now - held  # bytes of the process that are no part of the step
    compiled = memgraph.compile(model, held + int(share * allocated.peak), slices="auto", offload=None, time_limit=1)
    for step in range(STEPS):
        allocator.reset()
        loss = compiled(*batch)
        loss.backward()
        most, report = allocator.most, compiled.plan
        assert report.slices
        yield Counted(name, share, step, most - elsewhere, report.measured, report.peak, report.budget)
        loss = None
        model.zero_grad()


if __name__ == "__main__":
    main()
