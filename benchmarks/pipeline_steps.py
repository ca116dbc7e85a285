"""Steps of a pipeline beside torch's pipeline stages, and a model of three times the budget of each rank.

    python -m benchmarks.pipeline_steps [--ranks 2 --ranks 4] [--rounds 7] [--width 256] [--layers 8]

Starts torchrun with so many gloo processes, each on one thread.  Blocks of a transformer, without attention, train on 8
micro-batches under 1F1B.  torch's stages have equal numbers of blocks, ours are cut by the plan, without a budget and
with 0.7 of what torch's largest stage takes, the latter also under other schedules and with a disk.  All run in turn; a
round ends when the last rank is done.  Bytes are those of a meter that shares no code with memgraph: blocks of torch's
allocator, of the stage's parameters and gradients and of the step.

The last row has a third of what a plain step takes, with gradients and AdamW's states, as the budget of each rank.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F

import memgraph
from benchmarks.clock import Pairs, Step, in_turn
from benchmarks.oss import launched
from benchmarks.records import write
from memgraph.profile.memory_meter import resident_bytes
from tests.support.allocator_meter import Allocator, preloaded
from tests.support.staged_models import Block

CHUNKS, ROWS, LENGTH = 8, 16, 128
SHARE = 0.7  # of torch's bytes
TORCH, FREE, TIGHT, THIRD = "torch's stages", "ours", f"ours, budget {SHARE} of torch's", "ours, budget 1/3 of plain"
TIGHTS: dict[str, dict[str, Any]] = {
    TIGHT: {},
    f"{TIGHT}, zero_bubble": {"schedule": "zero_bubble"},
    f"{TIGHT}, interleaved": {"schedule": "interleaved"},
    f"{TIGHT}, disk": {"offload": "disk"},
}


class WithLoss(nn.Module):
    """Blocks with their loss inside."""

    def __init__(self, blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.blocks(x), y)


def main(
    ranks: Annotated[list[int] | None, typer.Option()] = None, rounds: int = 7, width: int = 256, layers: int = 8,
    found: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:  # fmt: skip
    """Print a table for each number of ranks."""
    if found is not None:
        _rank(found, rounds, width, layers)
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= preloaded(Path(folder))  # of the ranks; this process has begun without
        for count in ranks or [2, 4]:
            rows = launched("benchmarks.pipeline_steps", count, rounds=rounds, width=width, layers=layers)
            write("pipeline", f"steps on {count} ranks", rows)
            Console(width=150).print(_table(count, rows))


def _rank(found: Path, rounds: int, width: int, layers: int) -> None:
    """Run one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    allocator, rank = Allocator(), dist.get_rank()
    x, y = torch.randn(ROWS, LENGTH, width), torch.randn(ROWS, LENGTH, width)
    dist.broadcast(x, 0)
    dist.broadcast(y, 0)
    steps, parts = {TORCH: _torch_step(_blocks(width, layers), x, y)}, {}
    parts[TORCH] = steps[TORCH].__self__.stage  # type: ignore[attr-defined]
    nbytes = {TORCH: _nbytes(allocator, steps[TORCH], parts[TORCH].parameters())}
    batch = resident_bytes([x, y])
    tight = int(SHARE * max(_of_all(nbytes[TORCH]))) + batch
    refused = {}
    for name, options in {FREE: {}, **TIGHTS}.items():
        try:
            steps[name], nbytes[name] = _ours(
                allocator, width, layers, x, y, None if name == FREE else tight, **options
            )
        except memgraph.BudgetError as error:  # on all ranks
            refused[name] = error.smallest - batch
    times = in_turn({name: _together(step) for name, step in steps.items()}, rounds, warm=2)
    plain = _plain_nbytes(allocator, width, layers, x, y)
    _, nbytes[THIRD] = _ours(allocator, width, layers, x, y, plain // 3, torch.optim.AdamW)
    each = _of_all(nbytes)
    if rank == 0:
        third = {"plain": plain, "budget": plain // 3 - batch}
        rows: list[dict[str, Any]] = [
            {"name": name, "seconds": times.get(name, []), "nbytes": [of[name] for of in each]} for name in nbytes
        ]
        rows[-1] |= third
        rows[-1:-1] = [
            {"name": name, "seconds": [], "nbytes": [], "smallest": least} for name, least in refused.items()
        ]
        found.write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def _of_all(own: Any) -> list[Any]:
    """Return the object of each rank."""
    each: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(each, own)
    return each


def _blocks(width: int, layers: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(layers)))


class _TorchStages:
    """torch's stage of this rank: an equal number of blocks."""

    def __init__(self, blocks: nn.Sequential, x: Tensor, y: Tensor) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        each = len(blocks) // ranks
        self.stage, self.x, self.y = blocks[rank * each : (rank + 1) * each], x, y
        stage = PipelineStage(self.stage, rank, ranks, torch.device("cpu"))
        self.schedule = Schedule1F1B(stage, CHUNKS, loss_fn=F.mse_loss)

    def step(self) -> None:
        arguments = [self.x] if dist.get_rank() == 0 else []
        target = self.y if dist.get_rank() == dist.get_world_size() - 1 else None
        self.schedule.step(*arguments, target=target, losses=None if target is None else [])


def _torch_step(blocks: nn.Sequential, x: Tensor, y: Tensor) -> Step:
    return _TorchStages(blocks, x, y).step


def _ours(
    allocator: Allocator, width: int, layers: int, x: Tensor, y: Tensor, budget: int | None,
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None, **options: Any,
) -> tuple[Step, int]:  # fmt: skip
    """Return a step of a pipeline under the budget, and its bytes on this rank."""
    model = WithLoss(_blocks(width, layers))
    pipe = memgraph.pipeline(model, budget, CHUNKS, optimizer=optimizer, **options)
    pipe.prepare(x, y)

    def step() -> None:
        pipe.step(x, y)
        if pipe.optimizer is not None:
            pipe.optimizer.step()

    return step, _nbytes(allocator, step, pipe.parameters(), 4 if optimizer else 2)


def _nbytes(allocator: Allocator, step: Step, parameters: Iterable[nn.Parameter], copies: int = 2) -> int:
    """Return the bytes of a later step, with parameters, gradients and states, `copies` of the parameters."""
    step()
    before = allocator.now
    allocator.reset()
    step()
    return allocator.most - before + copies * resident_bytes(parameters)


def _plain_nbytes(allocator: Allocator, width: int, layers: int, x: Tensor, y: Tensor) -> int:
    """Return the bytes of a step of the whole model on the whole mini-batch, AdamW's states among them."""
    model = WithLoss(_blocks(width, layers))
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(x, y).backward()
        optimizer.step()

    return _nbytes(allocator, step, model.parameters(), 4)


def _together(step: Step) -> Step:
    """Return the step with a wait for all ranks."""

    def run() -> None:
        step()
        dist.barrier()

    return run


def _table(ranks: int, rows: list[dict[str, Any]]) -> Table:
    title = f"{ranks} ranks, {CHUNKS} micro-batches, 1F1B"
    columns = "", "step over torch's", "middle half", "MB of each rank", "largest over torch's"
    table, torchs = Table(*columns, box=None, title=title), rows[0]
    for row in rows:
        if "smallest" in row:
            table.add_row(row["name"], "no plan", "", f"needs {row['smallest'] / 1e6:.2f}", "")
            continue
        pairs = Pairs(row["seconds"], torchs["seconds"]) if row["seconds"] else None
        ratio = (pairs.ratio_text, pairs.spread_text) if pairs else ("", "")
        most = max(row["nbytes"]) / max(torchs["nbytes"])
        table.add_row(row["name"], *ratio, ", ".join(f"{n / 1e6:.2f}" for n in row["nbytes"]), f"{most:.2f}")
    plain, budget = rows[-1]["plain"] / 1e6, rows[-1]["budget"] / 1e6
    table.caption = f"a plain step takes {plain:.2f} MB; a third, without the mini-batch, is {budget:.2f}"
    return table


if __name__ == "__main__":
    typer.run(main)
