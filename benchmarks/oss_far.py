"""Measure a sharded optimizer with states on disk: the smallest budget of a rank, and the time of a step.

    python -m benchmarks.oss_far [--ranks 2] [--rounds 7] [--width 1024] [--layers 12]

Starts torchrun with so many gloo processes, each on one thread, that train a net with AdamW: with an ample budget,
with the smallest budget if states stay on the device, and with the smallest if they may be offloaded. Steps run in
turn, each until the last rank is done; results/oss_far.json has every round.
"""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn, optim

import memgraph
from benchmarks.clock import Pairs, Step, in_turn, ms_text
from benchmarks.oss import launched, together
from benchmarks.records import write
from memgraph.storage.mapped_storage import is_offloaded

BATCH = 64
ROOM = 1 << 33
WARM = 2  # rounds: the first one makes states, and is measured


def main(
    ranks: int = 2,
    rounds: int = 7,
    width: int = 1024,
    layers: int = 12,
    found: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Print a table."""
    if found is not None:
        _rank(found, rounds, width, layers)
        return
    rows = launched("benchmarks.oss_far", ranks, rounds=rounds, width=width, layers=layers)
    write("oss_far", f"{ranks} ranks", rows)
    Console(width=120).print(_table(ranks, rows))


def _rank(found: Path, rounds: int, width: int, layers: int) -> None:
    """Run one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    x = torch.randn(BATCH, width, generator=torch.Generator().manual_seed(dist.get_rank()))
    made = partial(_compiled, width, layers)
    budgets = {"room": ROOM, "states near": _smallest(made, x, None), "states far": _smallest(made, x, "auto")}
    compiled = {name: made(budget, "auto") for name, budget in budgets.items()}
    steps: dict[str, Step] = {name: partial(_train, *one, x) for name, one in compiled.items()}
    taken = in_turn(steps, rounds, WARM, together)
    first = list(compiled["room"][0].parameters())
    rows = [
        {
            "name": name,
            "forecast": model.plan.peak,
            "measured": model.plan.measured,
            "far": _far_bytes(optimizer),
            "same": all(map(torch.equal, model.parameters(), first)),
            "seconds": taken[name],
        }
        for name, (model, optimizer) in compiled.items()
    ]
    if dist.get_rank() == 0:
        found.write_text(json.dumps(rows))
    dist.destroy_process_group()


def _compiled(
    width: int, layers: int, budget: int, offload: str | None
) -> tuple[memgraph.CompiledModule, memgraph.OSS]:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    optimizer = memgraph.OSS(net.parameters(), optim.AdamW, lr=1e-4)
    return memgraph.compile(net, budget, optimizer=optimizer, loss=_loss, offload=offload), optimizer


def _loss(y: Tensor) -> Tensor:
    return y.square().mean()


def _smallest(made: Any, x: Tensor, offload: str | None) -> int:
    """Return the smallest budget that has a plan, without gradients to accumulate into."""
    try:
        made(1000, offload)[0](x)
    except memgraph.BudgetError as error:
        return int(re.findall(r"Give budget=(\d+)", str(error))[0])
    raise RuntimeError("a budget that is enough for nothing is enough")


def _train(model: memgraph.CompiledModule, optimizer: memgraph.OSS, x: Tensor) -> None:
    model(x).backward()
    optimizer.step()
    optimizer.zero_grad()


def _far_bytes(optimizer: memgraph.OSS) -> int:
    values = (value for state in optimizer.inner.state.values() for value in state.values())
    return sum(value.nbytes for value in values if is_offloaded(value))


def _table(ranks: int, rows: list[dict[str, Any]]) -> Table:
    title = f"torch {torch.__version__}, {ranks} ranks, one thread each, AdamW; ratios to room: median, middle half"
    table = Table(
        "", "forecast MB", "measured MB", "far MB", "same bits", "step ms", "ratio", "", title=title, box=None
    )
    for row in rows:
        pairs = Pairs(row["seconds"], rows[0]["seconds"])
        mb = (f"{row[name] / 1e6:.1f}" for name in ("forecast", "measured", "far"))
        table.add_row(row["name"], *mb, str(row["same"]), ms_text(row["seconds"]), pairs.ratio_text, pairs.spread_text)
    return table


if __name__ == "__main__":
    typer.run(main)
