"""A child process that trains models of the zoo under budgets while the second meter counts every step.

    python -m tests.support.counted_steps --time-limit 2 gpt2:0.6 queue:1.0 ...    # one line of JSON for each step

Eager's own update runs between the steps; with `--optimizer` it is part of the step and of its budget.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

import memgraph
from memgraph.planning.lowering import lowering
from memgraph.profile.memory_meter import resident_bytes
from passes.ir.ops import is_region
from tests.support.allocator_meter import Allocator, preloaded
from tests.support.promise import eager_peak_of, tensors_of_batch
from tests.support.zoo import BESIDE, CASES, Case, fresh

# Models of transformers that are called with labels, so that the caller has no loss.
OUTPUTS = tuple(replace(case, name=f"{case.name}+outputs", beside=True) for case in CASES[:5])
ALL = {case.name: case for case in (*CASES, *OUTPUTS, *BESIDE)}
STEPS = 4  # measured, timed, perhaps planned again, and one more


@dataclass(frozen=True)
class Counted:
    """One step; bytes are of the whole device."""

    case: str
    share: float
    step: int
    counted: int  # by the second meter, and staging, which is not allocated by torch
    measured: int | None  # by memgraph itself
    forecast: int
    budget: int
    regions: int = 0  # ops between two memory ops that are compiled as one


def main() -> None:
    """Train the models that the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--time-limit", type=float)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--optimizer", action="store_true")
    parser.add_argument("--calls", type=int, default=1, help="in each step, whose gradients are added up")
    parser.add_argument("--regions", action="store_true", help="compile all that fits, slower or not")
    given = parser.parse_args()
    if given.regions:
        lowering.__dict__["faster_regions"] = lambda trace, found, *_: tuple(found)
    torch.set_num_threads(given.threads)
    warnings.simplefilter("ignore")
    allocator = Allocator()
    after_planning(allocator.reset)
    for name, share in (pair.split(":") for pair in given.cases):
        for row in counted(
            ALL[name], float(share), allocator, given.time_limit, given.optimizer, given.calls, given.regions
        ):
            print(json.dumps(asdict(row)), flush=True)


def counted(
    case: Case, share: float, allocator: Allocator, time_limit: float | None, with_optimizer: bool, calls: int = 1,
    lowers: bool = False,
) -> Iterator[Counted]:  # fmt: skip
    """Yield the calls of a model under a share of eager's activation peak, from the call to the end of backward.

    The last call of a step includes the optimizer's, with `--optimizer`.
    """
    gc.collect()
    model, batch = fresh(case)
    held = resident_bytes([*model.parameters(), *model.buffers(), *tensors_of_batch(batch)])
    elsewhere = allocator.now - held  # bytes of the process that are no part of the step
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    states = 2 * resident_bytes(model.parameters()) if with_optimizer else 0
    compiled = memgraph.compile(
        model, held + states + int(share * eager_peak_of(case)), loss=None if case.beside else case.loss,
        time_limit=time_limit, optimizer=optimizer if with_optimizer else None,
        lower="inductor" if lowers else None,
    )  # fmt: skip
    for step in range(STEPS * calls):
        is_last = (step + 1) % calls == 0
        allocator.reset()
        results = batch.of(compiled)
        loss = case.loss(results) if case.beside else results
        if step % 2:
            del results  # every other step keeps the model's results until its end
        loss.backward()
        report = compiled.plan
        if with_optimizer and is_last:
            optimizer.step()
        most = allocator.most
        staging = int(report.forecast.by_kind["staging"].max(initial=0))
        found = most - elsewhere + staging
        count = sum(map(is_region, report.forecast.trace.ops))
        yield Counted(case.name, share, step, found, compiled.plan.measured, report.peak, report.budget, count)
        loss = results = None
        if not is_last:
            continue
        if not with_optimizer:
            optimizer.step()
            optimizer.state.clear()
        optimizer.zero_grad()


def rows_of_child(module: str, names: Iterable[str], folder: Path) -> list[Counted]:
    """Return the steps that a child process has counted; the second meter's library is built in `folder`."""
    command = [sys.executable, "-m", module, *names]
    ended = subprocess.run(command, env=preloaded(folder), capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return [Counted(**json.loads(line)) for line in ended.stdout.splitlines()]


def after_planning(call: Callable[[], None]) -> None:
    """Call a function after each planning, whose memory is no part of the step."""

    class Planned(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage().startswith("planned in"):
                call()

    logger = logging.getLogger("memgraph")
    logger.setLevel(logging.INFO)
    logger.addHandler(Planned())


if __name__ == "__main__":
    main()
