"""Train one architecture: eager, then compiled under each share of eager's activations; a line of JSON for each.

    python -m benchmarks.zoo.child cpu gpt2 1.2 0.6 0.4      # LD_PRELOAD holds the second meter's library

Each training has the same seeds and three steps of SGD.  Where no plan fits, the budget that the error names is given.
Blocks are counted by the second meter, from the end of planning to the end of backward.
"""

from __future__ import annotations

import gc
import json
import re
import sys
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

import memgraph
from memgraph.profile.library_workspaces import libraries_nbytes
from tests.support.cuda_meter import BLOCK

from .architectures import ARCHITECTURES, Architecture
from .facts import seed, tensors_in
from .row import Row
from .steps import Meter, Steps, train
from .torchvision_ops import import_torchvision
from .training import Training

ROOT = Path(__file__).parents[2]
TRIES = 4  # budgets: the one that is asked for, and those that errors name


def main(device: str, name: str, *shares: str) -> None:
    """Print a row for each share."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    import_torchvision()
    if device == "cuda":
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.cuda.init()
    for row in rows(ARCHITECTURES[name], tuple(map(float, shares)), Meter(torch.device(device))):
        print(json.dumps(asdict(row)), flush=True)


def rows(architecture: Architecture, shares: tuple[float, ...], meter: Meter) -> Iterator[Row]:
    """Yield what comes of each share."""
    expected = train(_fresh(architecture, meter)[0], None, meter).facts  # and fills the caches of libraries
    gc.collect()
    if meter.device.type == "cuda":
        libraries_nbytes(meter.device)  # all that a plan counts is there, whether eager needs it or not
        meter.libraries = meter.allocator.now
    training, held = _fresh(architecture, meter)
    elsewhere = meter.allocator.now - held
    eager = train(training, None, meter, expected)
    del training
    most = max(eager.peaks) - elsewhere
    for share in shares:
        row = Row(architecture.name, architecture.library, share, eager=most, budget=held + int(share * (most - held)))
        if eager.different:
            yield replace(row, reason=f"eager is not equal to itself: {', '.join(eager.different[:4])}")
        else:
            yield _compiled(architecture, row, expected, meter)


def _compiled(architecture: Architecture, row: Row, expected: list[Any], meter: Meter) -> Row:
    """Train under the budget of a row, or the one that an error names, and return the row with what came of it."""
    for _ in range(TRIES):
        gc.collect()  # bytes of an earlier try would count as those of something else
        try:
            return _tried(architecture, row, expected, meter)
        except memgraph.BudgetError as error:
            row = replace(row, needs=error.smallest, budget=error.smallest)
        except memgraph.CaptureError as error:
            return replace(row, state="refused", reason=_line(error))
        except Exception as error:
            traceback.print_exc()
            return replace(row, reason=f"{_line(error)} ({_place(error)})")
    return replace(row, reason="no budget that an error has named was enough")


def _tried(architecture: Architecture, row: Row, expected: list[Any], meter: Meter) -> Row:
    """Train under the budget of a row."""
    training, held = _fresh(architecture, meter)
    elsewhere = meter.allocator.now - held
    meter.planning = elsewhere
    compiled = memgraph.compile(training.model, row.budget)
    ours = train(training, compiled, meter, expected)
    if ours.different and (other := _unlike_itself(architecture, expected, meter)):
        return replace(row, reason=f"eager is not equal to itself: {', '.join(other[:4])}")
    return _found(replace(row, planning=meter.planning - elsewhere), compiled, ours, elsewhere)


def _unlike_itself(architecture: Architecture, expected: list[Any], meter: Meter) -> list[str]:
    """Return what differs between eager and some further trainings of eager's."""
    for _ in range(TRIES):
        if found := train(_fresh(architecture, meter)[0], None, meter, expected).different:
            return found
    return []


def _found(row: Row, compiled: memgraph.CompiledModule, ours: Steps, elsewhere: int) -> Row:
    """Return the row with what the steps have shown."""
    counted, forecast = max(
        ((peak - elsewhere, forecast) for peak, forecast in zip(ours.peaks, ours.forecasts, strict=True)),
        key=lambda pair: pair[0] - pair[1],
    )
    graphs = [step.parts.captured.graph.graph for step in compiled.__dict__["_kept"].steps]
    ops = [[str(node.target) for node in graph.nodes if node.op == "call_function"] for graph in graphs]
    guards, opaque = (max(sum(name in op for op in graph) for graph in ops) for name in ("memgraph_guards", "opaque"))
    return replace(
        row, state="opaque" if opaque else "guards" if guards else "whole", guards=guards, opaque=opaque,
        ops=max(map(len, ops)), seconds=ours.seconds, cpu_seconds=ours.cpu_seconds, different=tuple(ours.different),
        counted=counted, forecast=forecast, kinds=len(graphs), reason=ours.beyond,
    )  # fmt: skip


def _fresh(architecture: Architecture, meter: Meter) -> tuple[Training, int]:
    """Return the training that these seeds give, and the bytes of its parameters, buffers, batch, and of libraries."""
    seed(0)
    training = architecture.make().to(meter.device)
    owned = [*training.model.parameters(), *training.model.buffers()]
    batch = [tensor for _, tensor in tensors_in((training.args, dict(training.kwargs)), "batch")]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in [*owned, *batch]}
    block = BLOCK if meter.device.type == "cuda" else 1
    return training, meter.libraries + sum(-(-nbytes // block) * block for nbytes in storages.values())


def _line(error: BaseException) -> str:
    """Return an error as one line."""
    return _short(" ".join(f"{type(error).__name__}: {error}".split()))


def _place(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return _short(f"{frame.filename}:{frame.lineno}")


def _short(text: str) -> str:
    """Return a text with paths of files from their package's or this project's folder on."""
    return re.sub(r"\S*/site-packages/", "", text).replace(f"{ROOT}/", "")


if __name__ == "__main__":
    main(*sys.argv[1:])
