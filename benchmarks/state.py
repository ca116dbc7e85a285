"""A model whose parameters, gradients and Adam states do not fit: bytes of device a parameter, and what they cost.

    python -m benchmarks.state [--per 8 --per 1 ...] [--steps 10] [--layers 10] [--width 2048]
    python -m benchmarks.state overlap    # `overlap.py`: what of a step that waits for its disk goes on beside compute

The golden configuration of FairScale's OffloadModel, which takes 4.03 bytes of device a parameter with it: a
TransformerLM of 292.9 million parameters, batch 8, 32 tokens, Adam.  Plain Adam trains first, in memory; then memgraph
with each budget, from the same seeds: losses must be the same numbers, and measured <= forecast <= budget.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import memgraph
from passes import Stream

VOCABULARY, BATCH, TOKENS, HEADS, DROPOUT = 10_000, 8, 32, 32, 0.1
PER = (20.0, 16.0, 8.0, 4.0, 2.0, 1.0)
COLUMNS = ("bytes/parameter", "budget MB", "forecast MB", "measured MB", "measured/parameter", "kept") + (
    ("losses equal", "step s", "of plain", "forecast/step", "streamed")
)  # fmt: skip


class TransformerLM(nn.Module):
    """Tokens and the tokens after them in, the mean loss out."""

    mask: Tensor

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.place = nn.Parameter(torch.zeros(TOKENS, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, HEADS, width, dropout=DROPOUT, batch_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(width, VOCABULARY)
        self.register_buffer("mask", torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1))

    def forward(self, now: Tensor, then: Tensor) -> Tensor:
        x = self.token(now) * self.token.embedding_dim**0.5 + self.place
        for layer in self.layers:
            x = layer(x, src_mask=self.mask)
        return F.cross_entropy(self.head(x).flatten(0, 1), then.flatten())


@dataclass(frozen=True)
class Run:
    """A training: its losses, the seconds of each step, and the last plan's report, if there is one."""

    losses: list[float]
    seconds: list[float]
    report: Any = None

    @property
    def settled(self) -> list[float]:
        """The seconds of the steps in which nothing is planned any more."""
        return self.seconds[min(3, len(self.seconds) - 1) :]

    @property
    def step(self) -> float:
        return statistics.median(self.settled)


def main(
    context: typer.Context,
    per: Annotated[list[float] | None, typer.Option()] = None,
    steps: int = 10,
    layers: int = 10,
    width: int = 2048,
) -> None:
    """Print one table; exit with 1 if a loss differs or a budget is broken."""
    if context.invoked_subcommand:
        return
    count = parameters(layers, width)
    plain = train(lambda model, adam: model, layers, width, steps)
    title = f"{count / 1e6:.1f}M parameters, Adam, {BATCH} x {TOKENS} tokens, {steps} steps, torch {torch.__version__}"
    table = Table(
        *COLUMNS, title=f"{title}, {torch.get_num_threads()} threads; plain step {plain.step:.2f} s", box=None
    )
    broken = False
    for share in per or PER:
        run = train(compiled(int(share * count)), layers, width, steps)
        kept = run.report.measured <= run.report.peak <= run.report.budget
        broken |= not kept or run.losses != plain.losses
        table.add_row(f"{share:g}", *_cells(run, plain, count, kept))
        Console(stderr=True).print(f"{share:g} bytes a parameter: {run.step:.2f} s a step")
    Console(width=170).print(table)
    raise typer.Exit(broken)


def _cells(run: Run, plain: Run, count: int, kept: bool) -> list[str]:
    report = run.report
    predicted = report.repriced_us or report.predicted_us  # the update included, as in the step
    return [
        *(f"{nbytes / 1e6:.1f}" for nbytes in (report.budget, report.peak, report.measured)),
        *(f"{report.measured / count:.3f}", str(kept), str(run.losses == plain.losses)),
        *(f"{run.step:.2f}", f"{run.step / plain.step:.2f}", f"{predicted / 1e6 / run.step:.2f}"),
        str(sum(isinstance(decision, Stream) for decision in report.plan)),
    ]


def parameters(layers: int, width: int) -> int:
    """How many the model has."""
    return sum(parameter.numel() for parameter in _model(layers, width).parameters())


def compiled(budget: int, fuse: bool = False) -> Callable[[nn.Module, torch.optim.Optimizer], nn.Module]:
    return lambda model, adam: memgraph.compile(model, budget, optimizer=adam, fuse_update=fuse)


def train(wrap: Callable[[nn.Module, torch.optim.Optimizer], Any], layers: int, width: int, steps: int) -> Run:
    gc.collect()
    model = _model(layers, width)
    adam = torch.optim.Adam(model.parameters(), lr=1e-4)
    called = wrap(model, adam)
    random = torch.Generator().manual_seed(1)
    losses, seconds = [], []
    for _ in range(steps):
        now, then = (torch.randint(VOCABULARY, (BATCH, TOKENS), generator=random) for _ in range(2))
        begin = time.perf_counter()
        loss = called(now, then)
        loss.backward()
        adam.step()
        adam.zero_grad()
        seconds.append(time.perf_counter() - begin)
        losses.append(loss.item())
    return Run(losses, seconds, getattr(called, "plan", None))


def _model(layers: int, width: int) -> TransformerLM:
    torch.manual_seed(0)
    return TransformerLM(layers, width)


def commands() -> typer.Typer:
    """This table alone, or a section with a name."""
    from benchmarks.overlap import overlap  # which trains as this module does

    app = typer.Typer()
    app.callback(invoke_without_command=True)(main)
    app.command()(overlap)
    return app


if __name__ == "__main__":
    commands()()
