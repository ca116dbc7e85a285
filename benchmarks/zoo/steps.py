"""Three steps of a training, eager or compiled, counted and compared with others to the bit.

eager = train(training, None, meter)                       # facts of each step
ours = train(training, compiled, meter, eager.facts)       # peaks, forecasts, what is different
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

import memgraph
from tests.support.allocator_meter import Allocator
from tests.support.cuda_meter import CudaAllocator

from .facts import different, seed, step_facts
from .training import Training

STEPS = 3


@dataclass
class Steps:
    """What came of the steps; facts are kept only where there is nothing to compare with."""

    facts: list[dict[str, Tensor]] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)  # of the whole process
    forecasts: list[int] = field(default_factory=list)
    seconds: float = 0.0  # of the first forward, which captures and plans
    cpu_seconds: float = 0.0
    beyond: str = ""  # why a step exceeded its forecast, as its report says


class Meter(logging.Handler):
    """The second meter; what planning takes is no part of a step, and is kept beside."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.allocator = CudaAllocator() if device.type == "cuda" else Allocator()
        self.planning = 0
        self.libraries = 0  # bytes that libraries keep on a device, once eager has run
        logger = logging.getLogger("memgraph")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("planned in"):
            self.planning = max(self.planning, self.allocator.most)
            self.allocator.reset()


def train(
    training: Training, model: nn.Module | None, meter: Meter, expected: Sequence[dict[str, Tensor]] = ()
) -> Steps:
    """Train; `model` is called in the place of the training's own, whose parameters it has."""
    found = Steps()
    optimizer = torch.optim.SGD(training.model.parameters(), lr=0.01)
    seed(1)
    for step in range(STEPS):
        meter.allocator.reset()
        wall, cpu = time.perf_counter(), time.process_time()
        outputs = (model or training.model)(*training.args, **training.kwargs)
        if step == 0:
            found.seconds, found.cpu_seconds = time.perf_counter() - wall, time.process_time() - cpu
        loss = training.loss(outputs)
        loss.backward()
        found.peaks.append(meter.allocator.most)
        facts = step_facts(training.model, outputs, loss)
        if expected:
            found.different += [f"step {step} {name}" for name in different(facts, expected[step])]
        else:
            found.facts.append(facts)
        del outputs, loss, facts
        if isinstance(model, memgraph.CompiledModule):
            _read(found, model)
        optimizer.step()
        optimizer.zero_grad()
    return found


def _read(found: Steps, model: memgraph.CompiledModule) -> None:
    """Add what the report says of the latest step."""
    report = model.plan
    found.peaks[-1] += int(report.forecast.by_kind["staging"].max(initial=0))  # buffers that are no tensors
    found.forecasts.append(report.peak)
    found.beyond = found.beyond or report.beyond
