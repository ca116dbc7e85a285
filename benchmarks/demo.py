"""Train a GPT of 25 million parameters eagerly and under a budget: only memory and time differ.

    eager     ->  the peak of its step, above its resident bytes: parameters, AdamW's states, a batch
    memgraph  ->  the same step, the same losses, with 45 % of eager's activations

Both start from one seed and read the same bytes of Python's standard library. Each has its own process, and they
step in turn, because other work on the machine then slows both. In the output:

- resident: parameters, buffers, AdamW's states and a batch, which exist when a step begins; for memgraph, its staging
  as well.
- measured: resident, and the peak above it in one step: forward, backward and update. Gradients are part of it, because
  each step begins without them. The profiler measures one step, which is not timed.
- eager's activations: eager's measured bytes less resident and a full set of gradients. Its peak comes when backward
  begins and few gradients exist, so this is less than the true size of activations, and the budget is tighter.
- the budget, unless one is given: resident, a full set of gradients, and 45 % of eager's activations.
- step: the median and middle half of the steps without planning or measuring. The ratio is that of two steps,
  one after the other: the median of all pairs, and the middle half.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
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
from benchmarks.clock import Pairs, in_turn, middle
from benchmarks.gpt import GPT, Shape, batch, text
from benchmarks.sides import Side
from memgraph.profile.memory_meter import measure_peak, resident_bytes

SHARE = 0.45
UNTIMED = 3  # steps: one is planned for, one is timed op by op, and one may be planned for again
MEASURED = 1  # which of eager's steps is measured; the first makes AdamW's states
console = Console()


@dataclass(frozen=True)
class Bytes:
    """The bytes of a step; the fields are explained above."""

    resident: int
    gradients: int
    allocated: int  # above `resident`

    @property
    def measured(self) -> int:
        return self.resident + self.allocated

    @property
    def activations(self) -> int:
        return self.allocated - self.gradients


class Training:
    """A training in its own process; eager without a budget."""

    def __init__(self, shape: Shape, size: int, threads: int, budget: str | int | None = None) -> None:
        torch.set_num_threads(threads)
        self.model, self.optimizer = fresh(shape)
        compiled = memgraph.compile(self.model, budget=budget, optimizer=self.optimizer) if budget else None
        self.compiled, self.called = compiled, compiled or self.model
        self.source, self.size, self.context = text(), size, shape.context

    def step(self, number: int) -> float:
        """Run a step, and return its loss."""
        return step(self.called, self.optimizer, batch(self.source, number, self.size, self.context))

    def measured(self, number: int) -> tuple[float, Bytes]:
        """Run a step, and return its loss and its bytes as measured by the profiler."""
        now = batch(self.source, number, self.size, self.context)
        held = staging(self.compiled.plan) if self.compiled is not None else 0
        resident = resident_bytes([*everlasting(self.model, self.optimizer), *now]) + held
        loss, allocation = measure_peak(lambda: step(self.called, self.optimizer, now))
        if allocation is None:
            raise RuntimeError("a step can't be measured while another profiler runs")
        return loss, Bytes(resident, resident_bytes(self.model.parameters()), allocation.peak)

    def report(self) -> tuple[str, int, float]:
        """Return the report, the budget in bytes, and the predicted overhead."""
        assert self.compiled is not None
        plan = self.compiled.plan
        return str(plan), plan.budget, plan.longer

    def digest(self) -> str:
        return digest(self.model.parameters())


@dataclass
class Run:
    """The results of one training."""

    side: Side
    tick: Callable[[float], None]
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # of each step that was not measured
    bytes: Bytes | None = None

    def step(self) -> None:
        begin = perf_counter()
        loss = self.side.do("step", len(self.losses))
        self.seconds.append(perf_counter() - begin)
        self._note(loss)

    def measure(self) -> Bytes:
        loss, self.bytes = self.side.do("measured", len(self.losses))
        self._note(loss)
        return self.bytes

    def _note(self, loss: float) -> None:
        self.losses.append(loss)
        self.tick(loss)


def main(
    steps: Annotated[int, typer.Option(min=UNTIMED + 2, help="Steps of each training; 4 of them are not timed.")] = 10,
    budget: Annotated[str | None, typer.Option(help="Such as 800MB; 45 % of eager's activations if not given.")] = None,
    layers: Annotated[int, typer.Option(min=1)] = 8,
    width: Annotated[int, typer.Option(min=64, help="A multiple of 64.")] = 512,
    size: Annotated[int, typer.Option("--batch", min=1, help="Passages of 256 bytes in a batch.")] = 8,
) -> None:
    """Train a GPT eagerly and under a budget, and compare."""
    shape = Shape(layers, width, heads=max(1, width // 64))
    print(f"{shape}, batches of {size} x {shape.context} bytes, {steps} steps of each, in turn")
    about = shape, size, torch.get_num_threads()
    with progress(steps) as tick, Side(Training, *about) as plain:
        eager = Run(plain, tick("eager"))
        for _ in range(MEASURED):
            eager.step()
        had = eager.measure()
        wanted = budget or had.resident + had.gradients + int(SHARE * had.activations)
        with Side(Training, *about, wanted) as side:
            ours = Run(side, tick("memgraph"))
            pairs = trained(eager, ours, steps)
            ours.measure()
            report, allowed, forecast = side.do("report")
            digests = plain.do("digest"), side.do("digest")
    print(f"\n{report}\n")
    console.print(compared(eager, ours, pairs, allowed, forecast, digests))
    finish(eager, ours, allowed, digests)


def trained(eager: Run, ours: Run, steps: int) -> Pairs:
    """Run all of eager's steps and all but the last of memgraph's: its first ones alone, then both in turn."""
    for _ in range(UNTIMED):
        ours.step()
    rounds = steps - 1 - UNTIMED
    taken = in_turn({"eager": eager.step, "ours": ours.step}, rounds, warm=0)
    while len(eager.losses) < steps:
        eager.step()
    return Pairs(taken["ours"], taken["eager"])


def fresh(shape: Shape) -> tuple[GPT, torch.optim.Optimizer]:
    """Return a model, always with the same parameters and the same generator state."""
    torch.manual_seed(0)
    model = GPT(shape)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-4)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> float:
    loss = model(*batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def everlasting(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Return the tensors that exist between steps."""
    yield from model.parameters()
    yield from model.buffers()
    yield from (leaf for leaf in tree_leaves(dict(optimizer.state)) if isinstance(leaf, Tensor))


def staging(report: memgraph.Report) -> int:
    """Return the bytes of staging, which a profiler does not see."""
    return int(report.forecast.by_kind["staging"].max(initial=0))


def digest(parameters: Iterable[Tensor]) -> str:
    whole = hashlib.sha256()
    for parameter in parameters:
        whole.update(parameter.detach().contiguous().numpy().data)
    return whole.hexdigest()


def compared(eager: Run, ours: Run, pairs: Pairs, budget: int, forecast: float, digests: tuple[str, str]) -> Table:
    table = Table(title="one model, two trainings", title_justify="left")
    for column in ("", "eager", "memgraph", "of eager's"):
        table.add_column(column, justify="right" if column in ("eager", "memgraph") else "left")
    assert eager.bytes is not None and ours.bytes is not None
    for name, attribute in {
        "peak of a step, measured": "measured",
        "  resident": "resident",
        "  gradients": "gradients",
        "  activations": "activations",
    }.items():
        mine, theirs = getattr(ours.bytes, attribute), getattr(eager.bytes, attribute)
        table.add_row(name, mb(theirs), mb(mine), f"{mine / theirs:.1%}")
    table.add_row("budget", "none", mb(budget), f"{budget / eager.bytes.measured:.1%}")
    low, median, high = (f"{ratio - 1:+.1%}" for ratio in middle(pairs.ratios))
    rows = [span(seconds) for seconds in (pairs.theirs, pairs.ours)]
    table.add_row(
        f"step, median of {len(pairs.ours)}", *(row[0] for row in rows), f"{median}, forecast {forecast:+.1%}"
    )
    table.add_row("  middle half", *(row[1] for row in rows), f"{low} to {high}")
    table.add_row("first step and planning", f"{eager.seconds[0]:.2f} s", f"{ours.seconds[0]:.2f} s")
    table.add_row("loss, first", f"{eager.losses[0]:.4f}", f"{ours.losses[0]:.4f}")
    gap = difference(eager, ours)
    table.add_row("loss, last", f"{eager.losses[-1]:.4f}", f"{ours.losses[-1]:.4f}", f"largest difference {gap}")
    same = "the same bits" if digests[0] == digests[1] else "NOT the same bits"
    table.add_row("parameters at the end", *(text[:8] for text in digests), same)
    return table


def span(seconds: Iterable[float]) -> tuple[str, str]:
    """Format the median, and the middle half."""
    low, median, high = middle(seconds)
    return f"{median:.2f} s", f"{low:.2f}-{high:.2f} s"


def finish(eager: Run, ours: Run, budget: int, digests: tuple[str, str]) -> None:
    """Print whether the promise was kept, and exit with 1 if not."""
    broken = []
    assert ours.bytes is not None
    if ours.bytes.measured > budget:
        broken.append(f"the budget of {mb(budget)} was overshot by {ours.bytes.measured - budget} bytes")
    if difference(eager, ours) != 0.0 or digests[0] != digests[1]:
        broken.append("the two trainings differ")
    console.print("; ".join(broken) or "under the budget, and bit for bit the same training")
    if broken:
        raise typer.Exit(1)


def difference(eager: Run, ours: Run) -> float:
    return max(abs(a - b) for a, b in zip(eager.losses, ours.losses, strict=True))


def mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB"


@contextmanager
def progress(steps: int) -> Iterator[Callable[[str], Callable[[float], None]]]:
    """Show a progress bar with the loss for each name."""
    loss, count, clock = TextColumn("{task.fields[loss]}"), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(TextColumn("{task.description:9}"), BarColumn(), count, loss, clock, console=console) as bars:

        def bar(name: str) -> Callable[[float], None]:
            task = bars.add_task(name, total=steps, loss="")
            return lambda loss: bars.update(task, advance=1, loss=f"loss {loss:.4f}")

        yield bar


if __name__ == "__main__":
    typer.run(main)
