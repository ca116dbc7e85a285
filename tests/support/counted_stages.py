"""A child process that runs a pipeline under budgets, while the second meter counts each rank.

python -m tests.support.counted_stages 2 4 1f1b gpt2 0.6    # ranks, micro-batches, schedule, model, share of the room
python -m tests.support.counted_stages 2 4 1f1b wide 1.0 disk    # all that can be is offloaded or recomputed

It prints a line of JSON for each rank: counted, forecast and budget bytes. A share of 1 leaves each rank the room that
it takes without a plan, beside what it holds in any case; with 0 the budgets are the smallest that an error names.
"""

from __future__ import annotations

import gc
import json
import sys
import warnings
from typing import Any

import pytest
import torch

import memgraph
from memgraph.profile.memory_meter import resident_bytes
from passes import Offload
from tests.support.allocator_meter import Allocator
from tests.support.forced_plans import offloading
from tests.support.ranks import on_ranks
from tests.support.staged_models import Batch, made, wide


def main() -> None:
    """Run the pipeline that the command line names."""
    ranks, chunks, schedule, name, share, *disk = sys.argv[1:]
    for row in on_ranks(int(ranks), counted, int(chunks), schedule, name, float(share), bool(disk)):
        print(json.dumps(row))


def counted(rank: int, chunks: int, schedule: str, name: str, share: float, disk: bool) -> dict[str, Any]:
    """Return the bytes of a rank in three steps with updates, and in later calls of other kinds."""
    warnings.simplefilter("ignore")
    with pytest.MonkeyPatch.context() as patch:
        if disk:
            offloading(patch)
        return _counted(rank, chunks, schedule, name, share)


def _counted(rank: int, chunks: int, schedule: str, name: str, share: float) -> dict[str, Any]:
    allocator = Allocator()
    each = _budgets(chunks, schedule, name, share) if share else _smallest(chunks, schedule, name)
    pipe, kept, batch = _prepared("4GB" if share == 1.0 else each, chunks, schedule, name)
    gc.collect()
    elsewhere, most = allocator.now - _held(pipe, batch), []
    for _ in range(3):
        allocator.reset()
        pipe.step(**batch)
        pipe.optimizer.step()
        most.append(allocator.most - elsewhere)
    row = {"counted": most, "forecast": pipe.peak, "budget": pipe.given.budgets[rank], "kept": kept}
    plans = [stage.plan.choice.plan for stages in pipe._latest.stages.values() for stage in stages]
    row["offloads"] = any(isinstance(each, Offload) for plan in plans for each in plan)
    uneven = {key: value[: len(value) - 3].clone() for key, value in batch.items()}
    row["uneven"] = _counted_later(allocator, pipe, uneven)
    with torch.no_grad():
        row["evaluated"] = _counted_later(allocator, pipe, batch)
    return row


def _budgets(chunks: int, schedule: str, name: str, share: float) -> list[int]:
    loose, kept = _prepared("4GB", chunks, schedule, name)[:2]
    budget = kept + int(share * (loose.peak - kept))
    return [int(text) for text in loose.group.share(str(budget).encode(), "budgets")]


def _smallest(chunks: int, schedule: str, name: str) -> list[int]:
    with pytest.raises(memgraph.BudgetError) as caught:
        _prepared(1, chunks, schedule, name)
    return list(json.loads(str(caught.value).partition("budget=")[2].partition("]")[0] + "]"))


def _counted_later(allocator: Allocator, pipe: Any, batch: Batch) -> tuple[int, int]:
    """Return the bytes of a rank in a step of another kind, and their forecast."""
    before, new = allocator.now, resident_bytes([*batch.values()])
    pipe.prepare(**batch)
    gc.collect()
    planned = allocator.now - before
    allocator.reset()
    pipe.step(**batch)
    tensors = [*pipe.state_dict().values(), *(each.grad for each in pipe.parameters())]
    states = [each for state in pipe.optimizer.state.values() for each in state.values()]
    held = resident_bytes([*tensors, *states])
    return allocator.most - before - planned + held + new, pipe.peak


def _prepared(budget: Any, chunks: int, schedule: str, name: str) -> tuple[Any, int, Batch]:
    """Return a pipeline, the bytes that its rank keeps in any case, and the mini-batch."""
    model, batch = wide(4 * chunks) if name == "wide" else made(name, 4 * chunks)
    pipe = memgraph.pipeline(model, budget, chunks, schedule=schedule, optimizer=torch.optim.AdamW)
    pipe.prepare(**batch)
    return pipe, _held(pipe, batch) + 3 * resident_bytes(pipe.parameters()), batch  # a gradient and two states


def _held(pipe: Any, batch: Batch) -> int:
    return resident_bytes([*pipe.state_dict().values(), *batch.values()])


if __name__ == "__main__":
    main()
