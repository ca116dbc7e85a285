"""A child process that plans steps under the smallest budget while the second meter counts the whole of each call.

    python -m tests.support.counted_planning plain adam    # one line of JSON for each call

Nothing is known of the machine, of ops or of plans when the first call comes. The calls differ in size, in whether
they add to gradients, and in whether there is a backward at all, so that most of them are planned.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

import memgraph
from memgraph.planning import plan_cache
from memgraph.profile import link_bandwidth, machine_profile, op_profiler, roofline
from memgraph.profile.memory_meter import resident_bytes
from memgraph.system import disturbance
from tests.support.allocator_meter import Allocator
from tests.support.smallest_budget import smallest_of

WIDTH, LAYERS, ROWS = 32, 6, 256
KNOWN = (machine_profile, link_bandwidth, op_profiler, roofline)


@dataclass(frozen=True)
class CountedCall:
    """One call, with its backward and its update; bytes are of the whole device."""

    case: str
    call: str
    counted: int
    budget: int
    warnings: list[str]  # of the library's log, but for those about other work of the machine


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts = list[str]()

    def emit(self, record: logging.LogRecord) -> None:
        if record.name != disturbance.LOG.name:  # prices move no byte
            self.texts.append(record.getMessage())


def main() -> None:
    """Train under the smallest budget, with the optimizers that the command line names."""
    torch.set_num_threads(1)
    os.environ["MEMGRAPH_CACHE"] = ""
    warnings, allocator = Warnings(), Allocator()
    logging.getLogger("memgraph").addHandler(warnings)
    for name in sys.argv[1:]:
        for row in counted(name, allocator, warnings):
            print(json.dumps(asdict(row)), flush=True)


def counted(name: str, allocator: Allocator, warnings: Warnings) -> Iterator[CountedCall]:
    """Yield the calls of a net."""
    torch.manual_seed(0)
    model = Net()
    batches = {"large": torch.randn(ROWS, WIDTH), "small": torch.randn(ROWS // 2, WIDTH)}
    budget = _smallest_budget(name, batches["large"])
    gc.collect()
    optimizer = optimizer_of(name, model)
    compiled = memgraph.compile(model, budget, optimizer=optimizer)
    elsewhere = allocator.now - resident_bytes([*model.parameters(), *batches.values()])
    for kind in ("large", "large", "small", "large adds", "small adds", "large evaluated", "large"):
        size, *how = kind.split()
        others = resident_bytes(batches.values()) - batches[size].nbytes
        allocator.reset()
        warnings.texts.clear()
        with torch.set_grad_enabled("evaluated" not in how):
            loss = compiled(batches[size])
        if loss.requires_grad:
            loss.backward()
            if optimizer is not None:
                optimizer.step()
            compiled.zero_grad(set_to_none="adds" not in how and kind != "small")
        most = allocator.most - elsewhere - others
        yield CountedCall(name, kind, most, budget, warnings.texts.copy())


def _smallest_budget(name: str, batch: Tensor) -> int:
    """Return the smallest budget of all calls, and forget all that was measured to find it."""
    model = Net()
    optimizer = optimizer_of(name, model)
    budget = smallest_of(lambda: memgraph.plan(model, batch, budget=1, optimizer=optimizer, accumulate=True))
    for module in KNOWN:
        vars(module)["_known"].clear()
    plan_cache._texts.clear()
    plan_cache._near.clear()
    return budget


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer | None:
    return {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[name](model.parameters()) if name != "plain" else None


if __name__ == "__main__":
    main()
