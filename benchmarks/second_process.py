"""Measure the phases of the first call of GPT2-124M in a first and in a second process.

    python -m benchmarks.second_process [--layers 12] [--length 128] [--share 0.6]

The budget is parameters, buffers and batch, and a share of the step's peak above them without a plan. Prices of ops are
measured before; plans are not on disk in the first process. Times are CPU times, which other work on the
machine hardly changes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.clock import loop_text
from benchmarks.phases import Phases

PHASES = {  # function that takes the time -> what it does; the rest counts for the function that calls it
    ("memgraph.planning.capture_step", "captured_call"): "capture",
    ("memgraph.planning.pricing.Pricing", "__call__"): "price",
    ("memgraph.planning.search.PlanSearch", "__call__"): "plan",
    ("memgraph.planning.later_step.LaterStep", "accumulated"): "plan the call that adds to gradients",
    ("memgraph.planning.planner.Planner", "_step"): "rewrite, partition",
    ("memgraph.runtime.step.Step", "__call__"): "run forward",
}


def main(layers: int = 12, length: int = 128, share: Annotated[float, typer.Option()] = 0.6) -> None:
    """Print the seconds of each phase in both processes."""
    with tempfile.TemporaryDirectory() as folder:
        _process(folder, layers, length, share)  # measures prices and links
        for kept in Path(folder).glob("plans*"):
            kept.unlink()
        results = {name: _process(folder, layers, length, share) for name in ("first", "second")}
    names = list(dict.fromkeys(name for result in results.values() for name in result if name != "bits"))
    table = Table("CPU seconds", *(f"{name} process" for name in results), box=None, title=loop_text())
    for name in names:
        table.add_row(name, *(f"{result.get(name, 0.0):.2f}" for result in results.values()))
    console = Console(width=120)
    console.print(table)
    console.print(
        f"gradients are {'equal' if len({result['bits'] for result in results.values()}) == 1 else 'UNEQUAL'}"
    )


def _process(folder: str, layers: int, length: int, share: float, **environment: str) -> dict[str, Any]:
    code = f"from benchmarks.second_process import first_call; first_call({layers}, {length}, {share})"
    there = {**os.environ, "MEMGRAPH_CACHE": folder, **environment}
    output = subprocess.run([sys.executable, "-c", code], env=there, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, Any] = json.loads(output.stdout.splitlines()[-1])
    return result


def first_call(layers: int, length: int, share: float) -> None:
    """Print the seconds of each phase of a model's first call as JSON."""
    import hashlib

    seconds: dict[str, float] = {}
    timed(seconds, "import torch, transformers", _import)
    import torch
    import transformers

    memgraph: Any = timed(seconds, "import memgraph", lambda: __import__("memgraph"))
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=layers))
    ids = torch.randint(0, 50257, (1, length))
    compiled = memgraph.compile(model, budget=_budget(model, ids, share))
    phases = Phases(PHASES.values())
    for (owner, name), phase in PHASES.items():
        _count(owner, name, phase, phases)
    result = timed(seconds, "the first call", lambda: compiled(ids, labels=ids))
    timed(seconds, "its backward", result.loss.backward)
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.grad.numpy().tobytes())
    inner = {f"  {name}": spent for name, spent in phases.seconds.items()}
    print(json.dumps({**seconds, **inner, "bits": digest.hexdigest()}))


def _import() -> None:
    __import__("torch")
    __import__("transformers").GPT2LMHeadModel  # noqa: B018  # is imported when it is read first


def _budget(model: Any, ids: Any, share: float) -> int:
    """Return the budget, which does not depend on the process: a file holds it after the first."""
    path = Path(os.environ["MEMGRAPH_CACHE"]) / "budget"
    if path.exists():
        return int(path.read_text())
    import memgraph

    forecast = memgraph.plan(model, ids, labels=ids, budget=None).forecast
    there = sum(op.nbytes for op in forecast.trace.ops if op.is_input)
    path.write_text(str(there + int(share * (forecast.peak - there))))
    return int(path.read_text())


def timed(seconds: dict[str, float], name: str, work: Callable[[], Any]) -> Any:
    """Add the seconds of some work, and return its result."""
    begin = time.process_time()
    result = work()
    seconds[name] = time.process_time() - begin
    return result


def _count(owner: str, name: str, phase: str, phases: Phases) -> None:
    """Count the seconds of a function for a phase."""
    import importlib

    module, _, kind = owner.rpartition(".") if owner.rpartition(".")[2][0].isupper() else (owner, "", "")
    where: Any = importlib.import_module(module)
    where = getattr(where, kind) if kind else where
    setattr(where, name, phases.timed(phase, getattr(where, name)))


if __name__ == "__main__":
    typer.run(main)
