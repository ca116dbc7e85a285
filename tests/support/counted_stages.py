"""A child process that runs a pipeline under budgets, while the second meter counts each rank.

python -m tests.support.counted_stages 2 4 1f1b gpt2 0.6    # ranks, micro-batches, schedule, model, share of the room

It prints a line of JSON for each rank: counted, forecast and budget bytes. A share of 1 leaves each rank the room that
it takes without a plan, beside what it holds in any case.
"""

from __future__ import annotations

import gc
import json
import sys
import warnings
from typing import Any

import memgraph
from memgraph.profile.memory_meter import resident_bytes
from tests.support.allocator_meter import Allocator
from tests.support.ranks import on_ranks
from tests.support.staged_models import made, wide


def main() -> None:
    """Run the pipeline that the command line names."""
    ranks, chunks, schedule, name, share = sys.argv[1:]
    for row in on_ranks(int(ranks), counted, int(chunks), schedule, name, float(share)):
        print(json.dumps(row))


def counted(rank: int, chunks: int, schedule: str, name: str, share: float) -> dict[str, Any]:
    """Return the bytes of a rank in its second and third step."""
    warnings.simplefilter("ignore")
    allocator = Allocator()
    model, batch = wide(4 * chunks) if name == "wide" else made(name, 4 * chunks)
    loose = memgraph.pipeline(model, "4GB", chunks, schedule=schedule)
    loose.prepare(**batch)
    held = resident_bytes([*model.parameters(), *model.buffers(), *batch.values()])
    kept = held + resident_bytes(loose.parameters())
    budget = kept + int(share * (loose.peak - kept))
    each = [int(text) for text in loose.group.share(str(budget).encode(), "budgets")]
    given: Any = "4GB" if share == 1.0 else each
    pipe = memgraph.pipeline(model, given, chunks, schedule=schedule)
    pipe.prepare(**batch)
    del loose
    gc.collect()
    elsewhere = allocator.now - held
    most = []
    for _ in range(3):
        allocator.reset()
        pipe.step(**batch)
        most.append(allocator.most - elsewhere)
    return {"counted": most, "forecast": pipe.peak, "budget": pipe.given.budgets[rank], "kept": kept}


if __name__ == "__main__":
    main()
