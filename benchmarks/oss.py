"""Compare the sharded optimizer with DDP, torch's ZeroRedundancyOptimizer and FairScale's OSS.

    python -m benchmarks.oss [--ranks 2 --ranks 4] [--rounds 9] [--width 2048] [--layers 12] [--compiled]

Starts torchrun with so many gloo processes, each on one thread. All optimizers train a net of 50M parameters with Adam
in the same run, in turn. Two times are taken, each until the last rank is done: `step` is optimizer.step() alone, on
gradients that are the same on all ranks; `training` is forward, backward, averaging and update. Ratios are taken in
each round; the table gives their median and middle half, and results/oss.json every round.  With `--compiled` there are
two compiled modules more, whose parameters are gathered by the step, and by the next forward.  FairScale is left out
where it is not installed (`pip install -e .[peers]`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn, optim
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

try:
    from fairscale.optim.oss import OSS as FairScale
except ImportError:
    FairScale = None

import memgraph
from benchmarks.clock import Pairs, Step, in_turn, ms_text, seconds_of
from benchmarks.records import write

BATCH = 4
PLAIN = "DDP, Adam"
WARM = 2  # rounds: the first ones make states


def main(
    ranks: Annotated[list[int] | None, typer.Option()] = None,
    rounds: int = 9,
    width: int = 2048,
    layers: int = 12,
    compiled: bool = False,
    found: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Print a table for each number of ranks."""
    if found is not None:
        _rank(found, rounds, width, layers, compiled)
        return
    for count in ranks or [2, 4]:
        given = {"rounds": rounds, "width": width, "layers": layers}
        rows = launched("benchmarks.oss", count, "--compiled" if compiled else None, **given)
        write("oss", f"{count} ranks", rows)
        Console(width=120).print(_table(count, rows))


def launched(module: str, ranks: int, flag: str | None = None, **options: int) -> list[dict[str, Any]]:
    """Run a program under torchrun, and return the rows that it writes to its file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", module]
        given = [text for key, value in {"found": path, **options}.items() for text in (f"--{key}", str(value))]
        given += [flag] if flag is not None else []
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, *launch, *given], env=environment, check=True, timeout=600)
        return json.loads(path.read_text())


def _rank(found: Path, rounds: int, width: int, layers: int, compiled: bool) -> None:
    """Run one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    alone, plain, *gathered = (
        nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))) for _ in range(2 + 2 * compiled)
    )
    wrapped = DistributedDataParallel(plain)
    torch.manual_seed(dist.get_rank())
    x = torch.randn(BATCH, width)
    rows = []
    for fused in (False, True):
        optimizers = _optimizers(alone, wrapped, fused) | _compiled(gathered, fused)
        training = {name: _training(module, one, x) for name, (module, one) in optimizers.items()}
        trained = in_turn(training, rounds, WARM, together)
        bytes_of = {name: _most(_state_bytes(one)) for name, (_, one) in optimizers.items()}
        # Without DDP, `step()` also averages gradients, so its time would not be of the update alone.
        stepping = {name: pair for name, pair in optimizers.items() if pair[0] is wrapped}
        for _, one in optimizers.values():
            if isinstance(one, memgraph.OSS):
                one.gather()
        steps: dict[str, Step] = {name: _step(*pair) for name, pair in stepping.items()}
        stepped = in_turn(steps, rounds, WARM, together)
        kind = "fused" if fused else "default"
        rows += [
            {"adam": kind, "name": name, "state": bytes_of[name], "training": trained[name], "step": stepped.get(name)}
            for name in optimizers
        ]
    if dist.get_rank() == 0:
        found.write_text(json.dumps(rows))
    dist.destroy_process_group()


def _optimizers(alone: nn.Module, wrapped: nn.Module, fused: bool) -> dict[str, tuple[nn.Module, optim.Optimizer]]:
    """Return each optimizer with the module that it trains."""
    given: dict[str, Any] = {"lr": 1e-5, "fused": fused or None}
    shared = list(wrapped.parameters())
    return {
        PLAIN: (wrapped, optim.Adam(shared, **given)),
        "DDP, ZeroRedundancyOptimizer": (wrapped, ZeroRedundancyOptimizer(shared, optim.Adam, **given)),
        **({"DDP, FairScale OSS": (wrapped, FairScale(shared, optim.Adam, **given))} if FairScale else {}),
        "DDP, OSS": (wrapped, memgraph.OSS(shared, optim.Adam, gradients="same", **given)),
        "OSS": (alone, memgraph.OSS(alone.parameters(), optim.Adam, **given)),
    }


def _compiled(modules: Iterable[nn.Module], fused: bool) -> dict[str, tuple[nn.Module, optim.Optimizer]]:
    """Return the same for modules that memgraph compiles with an ample budget."""
    found: dict[str, tuple[nn.Module, optim.Optimizer]] = {}
    for module, gather in zip(modules, ("step", "forward"), strict=False):
        optimizer = memgraph.OSS(module.parameters(), optim.Adam, gather=gather, lr=1e-5, fused=fused or None)
        found[f"OSS, compiled, gather={gather}"] = memgraph.compile(module, optimizer=optimizer), optimizer
    return found


def _training(module: nn.Module, optimizer: optim.Optimizer, x: Tensor) -> Step:
    def step() -> None:
        module(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _step(module: nn.Module, optimizer: optim.Optimizer) -> Step:
    for parameter in module.parameters():
        if parameter.grad is None:
            parameter.grad = torch.full_like(parameter, 1e-3)
    return lambda: optimizer.step()


def together(step: Step) -> float:
    """Return the seconds until the last rank is done."""
    dist.barrier()
    return _most(seconds_of(step))


def _most(value: float) -> float:
    """Return the maximum over all ranks."""
    every = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(every, dist.ReduceOp.MAX)
    return every.item()


def _state_bytes(optimizer: optim.Optimizer) -> int:
    inner = getattr(optimizer, "inner", getattr(optimizer, "optim", optimizer))
    return sum(value.nbytes for state in inner.state.values() for value in state.values() if isinstance(value, Tensor))


def _table(ranks: int, rows: list[dict[str, Any]]) -> Table:
    title = f"torch {torch.__version__}, {ranks} ranks, one thread each; ratios to {PLAIN}: median, middle half"
    table = Table("Adam", "", "state", "step ms", "ratio", "", "training ms", "ratio", "", title=title, box=None)
    for row in rows:
        plain = next(other for other in rows if other["name"] == PLAIN and other["adam"] == row["adam"])
        share = f"{row['state'] / 1e6:.1f} MB = {row['state'] / plain['state']:.4f}"
        cells = [text for time in ("step", "training") for text in _cells(row[time], plain[time])]
        table.add_row(row["adam"], row["name"], share, *cells)
    return table


def _cells(taken: Iterable[float] | None, plain: Iterable[float]) -> list[str]:
    if taken is None:
        return ["", "", ""]
    seconds = list(taken)
    pairs = Pairs(seconds, list(plain))
    return [ms_text(seconds), pairs.ratio_text, pairs.spread_text]


if __name__ == "__main__":
    typer.run(main)
