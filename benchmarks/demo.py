"""Train a GPT of 25 million parameters twice, eagerly and under a budget, and show that only memory and time differ.

    eager     ->  the peak of its step, above what lies there for good: parameters, gradients, AdamW's states, a batch
    memgraph  ->  the same step, the same losses, with 45 % of that on top of what lies there for good

Both runs start from one seed and see the same bytes of Python's own standard library. Words, for both:

- resident: parameters, buffers, AdamW's states and a batch, all of which are there when a step begins; for memgraph,
  what it holds for its copies as well.
- measured: resident, and the highest bytes above it during one whole step: forward, backward and update. Gradients are
  among them, as each step begins without any. The profiler measures the last step, which is not timed.
- eager's activations: eager's measured bytes less resident and a full set of gradients. Its peak comes when backward
  begins and few gradients exist, so this is less than the activations truly take, and the budget is harder for it.
- the budget, unless one is given: resident, a full set of gradients, and 45 % of eager's activations.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import memgraph
from benchmarks.gpt import GPT, Shape, batch, text
from memgraph.peak import measured, resident_bytes

SHARE = 0.45
console = Console()


@dataclass(frozen=True)
class Run:
    """What one training was like; bytes as in the words above."""

    losses: tuple[float, ...]
    seconds: tuple[float, ...]  # of each step but the last, which is measured
    resident: int
    gradients: int
    allocated: int  # above `resident`
    digest: str  # of the parameters that came out

    @property
    def measured(self) -> int:
        return self.resident + self.allocated

    @property
    def activations(self) -> int:
        return self.allocated - self.gradients

    @property
    def step(self) -> float:
        """The median step, in seconds, without the first, which makes AdamW's states and memgraph's plan."""
        return median(self.seconds[1:])


Batch = tuple[Tensor, Tensor]
Tick = Callable[[float], None]


def main(
    steps: Annotated[int, typer.Option(min=3, help="Steps of each run; the first and the last are not timed.")] = 8,
    budget: Annotated[str | None, typer.Option(help="Such as 800MB; 45 % of eager's activations if not given.")] = None,
    layers: Annotated[int, typer.Option(min=1)] = 8,
    width: Annotated[int, typer.Option(min=64, help="A multiple of 64.")] = 512,
    size: Annotated[int, typer.Option("--batch", min=1, help="Passages of 256 bytes in a batch.")] = 8,
) -> None:
    """Train a GPT eagerly and under a budget, and compare."""
    shape = Shape(layers, width, heads=max(1, width // 64))
    source = text()
    batches = [batch(source, step, size, shape.context) for step in range(steps)]
    print(f"{shape}, {len(source) / 1e6:.1f} MB of text, batches of {size} x {shape.context} bytes")

    eager = train_eagerly(shape, batches)
    wanted = budget or eager.resident + eager.gradients + int(SHARE * eager.activations)
    planned, report = train_planned(shape, batches, wanted)
    print(f"\n{report}\n")
    console.print(compared(eager, planned, report.budget))
    finish(eager, planned, report.budget)


def train_eagerly(shape: Shape, batches: list[Batch]) -> Run:
    model, optimizer = fresh(shape)
    with progress("eager", len(batches)) as tick:
        return train(model, optimizer, batches, tick)


def train_planned(shape: Shape, batches: list[Batch], budget: str | int) -> tuple[Run, memgraph.Report]:
    model, optimizer = fresh(shape)
    compiled = memgraph.compile(model, budget=budget, optimizer=optimizer)
    with progress("memgraph", len(batches)) as tick:
        run = train(compiled, optimizer, batches, tick, lambda: staging(compiled.plan))
    return run, compiled.plan


def fresh(shape: Shape) -> tuple[GPT, torch.optim.Optimizer]:
    """The same parameters, and the same random numbers after them, each time."""
    gc.collect()
    torch.manual_seed(0)
    model = GPT(shape)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-4)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[Batch],
    tick: Tick = lambda loss: None,
    held: Callable[[], int] = lambda: 0,
) -> Run:
    """Step through the batches; the last step is measured, with what is `held` besides tensors."""
    losses, seconds = [], []
    for now in batches[:-1]:
        start = perf_counter()
        losses.append(step(model, optimizer, now))
        seconds.append(perf_counter() - start)
        tick(losses[-1])
    resident = resident_bytes([*everlasting(model, optimizer), *batches[-1]]) + held()
    loss, allocation = measured(lambda: step(model, optimizer, batches[-1]))
    if allocation is None:
        raise RuntimeError("a step can't be measured while another profiler runs")
    tick(loss)
    gradients = resident_bytes(model.parameters())
    return Run((*losses, loss), tuple(seconds), resident, gradients, allocation.peak, digest(model.parameters()))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> float:
    loss = model(*batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def everlasting(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """The tensors that are there between steps."""
    yield from model.parameters()
    yield from model.buffers()
    yield from (leaf for leaf in tree_leaves(dict(optimizer.state)) if isinstance(leaf, Tensor))


def staging(report: memgraph.Report) -> int:
    """Bytes that memgraph holds for its copies, outside of any tensor that a profiler sees."""
    return int(report.forecast.by_kind["staging"].max(initial=0))


def digest(parameters: Iterable[Tensor]) -> str:
    whole = hashlib.sha256()
    for parameter in parameters:
        whole.update(parameter.detach().contiguous().numpy().data)
    return whole.hexdigest()


def compared(eager: Run, planned: Run, budget: int) -> Table:
    table = Table(title="one model, two trainings", title_justify="left")
    for column in ("", "eager", "memgraph", "of eager's"):
        table.add_column(column, justify="right" if column in ("eager", "memgraph") else "left")
    for name, attribute in {
        "peak of a step, measured": "measured",
        "  resident": "resident",
        "  gradients": "gradients",
        "  activations": "activations",
    }.items():
        ours, theirs = getattr(planned, attribute), getattr(eager, attribute)
        table.add_row(name, mb(theirs), mb(ours), f"{ours / theirs:.1%}")
    table.add_row("budget", "none", mb(budget), f"{budget / eager.measured:.1%}")
    table.add_row(
        "step, median", f"{eager.step:.2f} s", f"{planned.step:.2f} s", f"{planned.step / eager.step - 1:+.1%}"
    )
    table.add_row("first step and planning", f"{eager.seconds[0]:.2f} s", f"{planned.seconds[0]:.2f} s")
    table.add_row("loss, first", f"{eager.losses[0]:.4f}", f"{planned.losses[0]:.4f}")
    gap = difference(eager, planned)
    table.add_row("loss, last", f"{eager.losses[-1]:.4f}", f"{planned.losses[-1]:.4f}", f"largest difference {gap}")
    same = "the same bits" if eager.digest == planned.digest else "NOT the same bits"
    table.add_row("parameters at the end", eager.digest[:8], planned.digest[:8], same)
    return table


def finish(eager: Run, planned: Run, budget: int) -> None:
    """Say whether the promise was kept; the exit status does, too."""
    broken = []
    if planned.measured > budget:
        broken.append(f"the budget of {mb(budget)} was overshot by {planned.measured - budget} bytes")
    if difference(eager, planned) != 0.0 or eager.digest != planned.digest:
        broken.append("the two trainings differ")
    console.print("; ".join(broken) or "under the budget, and bit for bit the same training")
    if broken:
        raise typer.Exit(1)


def difference(eager: Run, planned: Run) -> float:
    return max(abs(a - b) for a, b in zip(eager.losses, planned.losses, strict=True))


def mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB"


@contextmanager
def progress(name: str, steps: int) -> Iterator[Tick]:
    """A bar that moves with each step and shows its loss."""
    loss, count, clock = TextColumn("{task.fields[loss]}"), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(TextColumn("{task.description:9}"), BarColumn(), count, loss, clock, console=console) as bars:
        task = bars.add_task(name, total=steps, loss="")
        yield lambda loss: bars.update(task, advance=1, loss=f"loss {loss:.4f}")


if __name__ == "__main__":
    typer.run(main)
