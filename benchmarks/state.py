"""Train a model whose parameters, gradients and Adam states do not fit: device bytes per parameter, and step time.

    python -m benchmarks.state [--per 8 --per 1 ...] [--steps 10] [--layers 10] [--width 2048]
    python -m benchmarks.state overlap    # `overlap.py`: how far transfers to disk overlap with compute

The golden configuration of FairScale's OffloadModel, which takes 4.03 bytes of device a parameter with it: a
TransformerLM of 292.9 million parameters, batch 8, 32 tokens, Adam.  Under each budget, memgraph trains in turn with
plain Adam in memory, from the same seeds: losses must be the same numbers, and measured <= forecast <= budget.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import memgraph
from benchmarks.clock import Pairs, in_turn
from benchmarks.records import write
from passes import Stream

VOCABULARY, BATCH, TOKENS, HEADS, DROPOUT = 10_000, 8, 32, 32, 0.1
PER = (20.0, 16.0, 8.0, 4.0, 2.0, 1.0)
COLUMNS = ("bytes/parameter", "budget MB", "forecast MB", "measured MB", "measured/parameter", "kept") + (
    ("losses equal", "plain s", "step s", "of plain", "middle half", "forecast/step", "streamed")
)  # fmt: skip
Wrap = Callable[[nn.Module, torch.optim.Optimizer], Any]


class TransformerLM(nn.Module):
    """A language model that takes tokens and targets, and returns the mean loss."""

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


class Training:
    """A model that trains step by step, with its own batches and random numbers; keeps losses and seconds of steps."""

    def __init__(self, wrap: Wrap, layers: int, width: int) -> None:
        gc.collect()
        model = _model(layers, width)
        self.adam: Any = torch.optim.Adam(model.parameters(), lr=1e-4)
        self.called: Any = wrap(model, self.adam)
        self.batches = torch.Generator().manual_seed(1)
        self.random = torch.get_rng_state()
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self) -> None:
        now, then = (torch.randint(VOCABULARY, (BATCH, TOKENS), generator=self.batches) for _ in range(2))
        torch.set_rng_state(self.random)
        begin = time.perf_counter()
        loss = self.called(now, then)
        loss.backward()
        self.adam.step()
        self.adam.zero_grad()
        self.seconds.append(time.perf_counter() - begin)
        self.random = torch.get_rng_state()
        self.losses.append(loss.item())

    @property
    def report(self) -> Any:
        """The report of the last plan."""
        return self.called.plan

    @property
    def settled(self) -> list[float]:
        """The seconds of the steps after the last planning."""
        return self.seconds[min(3, len(self.seconds) - 1) :]

    @property
    def usual(self) -> float:
        """The median seconds of a settled step."""
        return statistics.median(self.settled)


def main(
    context: typer.Context,
    per: Annotated[list[float] | None, typer.Option()] = None,
    steps: int = 10,
    layers: int = 10,
    width: int = 2048,
    apart: Annotated[bool, typer.Option(help="train plainly first: two models need more room")] = False,
) -> None:
    """Print one table; exit with 1 if a loss differs or a budget is broken."""
    if context.invoked_subcommand:
        return
    count, rows = parameters(layers, width), list[Row]()
    shares = ", ".join(f"{share:g}" for share in per or PER)
    title = f"{count / 1e6:.1f}M parameters, Adam, {BATCH} x {TOKENS} tokens, {steps} steps, torch {torch.__version__}"
    table = Table(*COLUMNS, title=f"{title}, {torch.get_num_threads()} threads", box=None)
    for share in per or PER:
        plain, ours = _trained(int(share * count), layers, width, steps, apart)
        rows.append(row := _row(ours, plain, count))
        table.add_row(f"{share:g}", *_cells(row))
        write("state", f"{layers} layers of width {width}, {shares} bytes a parameter", [asdict(row) for row in rows])
        Console(stderr=True).print(f"{share:g} bytes a parameter: {ours.usual:.2f} s a step, plain {plain.usual:.2f} s")
        del plain, ours  # frees their memory before the next ones are made
    Console(width=170).print(table)
    raise typer.Exit(not all(row.kept and row.equal for row in rows))


def _trained(budget: int, layers: int, width: int, steps: int, apart: bool) -> tuple[Training, Training]:
    """Return what plain Adam and memgraph did in so many steps, which they took in turn or one after the other."""
    plain = Training(_unchanged, layers, width)
    if apart:
        in_turn({"plain": plain.step}, steps, warm=0)
        plain.called = plain.adam = None
    ours = Training(compiled(budget), layers, width)
    in_turn({"ours": ours.step} if apart else {"plain": plain.step, "ours": ours.step}, steps, warm=0)
    return plain, ours


@dataclass(frozen=True)
class Row:
    """The results for one budget: bytes, and the seconds of each step."""

    parameters: int
    budget: int
    forecast: int
    measured: int
    equal: bool  # the losses, all of them
    predicted_us: float  # a step, the update included
    streamed: int
    plain: list[float]
    ours: list[float]

    @property
    def kept(self) -> bool:
        return self.measured <= self.forecast <= self.budget


def _row(ours: Training, plain: Training, count: int) -> Row:
    report = ours.report
    streamed = sum(isinstance(decision, Stream) for decision in report.plan)
    predicted_us = report.repriced_us or report.predicted_us
    sizes = report.budget, report.peak, report.measured
    return Row(count, *sizes, ours.losses == plain.losses, predicted_us, streamed, plain.settled, ours.settled)


def _cells(row: Row) -> list[str]:
    pairs = Pairs(row.ours, row.plain)
    plain, ours = statistics.median(row.plain), statistics.median(row.ours)
    return [
        *(f"{nbytes / 1e6:.1f}" for nbytes in (row.budget, row.forecast, row.measured)),
        *(f"{row.measured / row.parameters:.3f}", str(row.kept), str(row.equal)),
        *(f"{plain:.2f}", f"{ours:.2f}", pairs.ratio_text, pairs.spread_text),
        f"{row.predicted_us / 1e6 / ours:.2f}",
        str(row.streamed),
    ]


def parameters(layers: int, width: int) -> int:
    """Return the number of parameters."""
    return sum(parameter.numel() for parameter in _model(layers, width).parameters())


def compiled(budget: int, fuse: bool = False) -> Wrap:
    return lambda model, adam: memgraph.compile(model, budget, optimizer=adam, fuse_update=fuse)


def _unchanged(model: nn.Module, adam: torch.optim.Optimizer) -> nn.Module:
    return model


def _model(layers: int, width: int) -> TransformerLM:
    torch.manual_seed(0)
    return TransformerLM(layers, width)


def commands() -> typer.Typer:
    """Run this table alone, or the section that is named."""
    from benchmarks.overlap import overlap  # which trains as this module does

    app = typer.Typer()
    app.callback(invoke_without_command=True)(main)
    app.command()(overlap)
    return app


if __name__ == "__main__":
    commands()()
