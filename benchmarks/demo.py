"""Train a GPT of 25 million parameters twice, eagerly and under a budget, and show that only memory and time differ.

    eager     ->  the peak of its step, above what lies there for good: parameters, gradients, AdamW's states, a batch
    memgraph  ->  the same step, the same losses, with 45 % of that on top of what lies there for good

Both start from one seed and see the same bytes of Python's own standard library.  Each has a process of its own, and
they step in turn: what else the machine does meanwhile hits both.  Words, for both:

- resident: parameters, buffers, AdamW's states and a batch, all of which are there when a step begins; for memgraph,
  what it holds for its copies as well.
- measured: resident, and the highest bytes above it during one whole step: forward, backward and update. Gradients are
  among them, as each step begins without any. The profiler measures one step, which is not timed.
- eager's activations: eager's measured bytes less resident and a full set of gradients. Its peak comes when backward
  begins and few gradients exist, so this is less than the activations truly take, and the budget is harder for it.
- the budget, unless one is given: resident, a full set of gradients, and 45 % of eager's activations.
- step: the median, and the middle half of all, of the steps that neither plan nor measure.  The ratio is that of a pair
  of steps which follow each other: the median of all pairs, and the middle half.
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
    """The bytes of a step, as in the words above."""

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
    """A training, eager without a budget; it lives in a process of its own."""

    def __init__(self, shape: Shape, size: int, threads: int, budget: str | int | None = None) -> None:
        torch.set_num_threads(threads)
        self.model, self.optimizer = fresh(shape)
        compiled = memgraph.compile(self.model, budget=budget, optimizer=self.optimizer) if budget else None
        self.compiled, self.called = compiled, compiled or self.model
        self.source, self.size, self.context = text(), size, shape.context

    def step(self, number: int) -> float:
        """The loss of a step."""
        return step(self.called, self.optimizer, batch(self.source, number, self.size, self.context))

    def measured(self, number: int) -> tuple[float, Bytes]:
        """The loss of a step, and its bytes, which a profiler counts."""
        now = batch(self.source, number, self.size, self.context)
        held = staging(self.compiled.plan) if self.compiled is not None else 0
        resident = resident_bytes([*everlasting(self.model, self.optimizer), *now]) + held
        loss, allocation = measure_peak(lambda: step(self.called, self.optimizer, now))
        if allocation is None:
            raise RuntimeError("a step can't be measured while another profiler runs")
        return loss, Bytes(resident, resident_bytes(self.model.parameters()), allocation.peak)

    def report(self) -> tuple[str, int, float]:
        """The report, the budget in bytes, and by how much the step was predicted to be longer than as it is."""
        assert self.compiled is not None
        plan = self.compiled.plan
        return str(plan), plan.budget, plan.longer

    def digest(self) -> str:
        return digest(self.model.parameters())


@dataclass
class Run:
    """What one training was like."""

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
    """Both trainings but for our last step: eager is ahead by those that it has taken, the others are taken in turn."""
    for _ in range(UNTIMED):
        ours.step()
    rounds = steps - 1 - UNTIMED
    taken = in_turn({"eager": eager.step, "ours": ours.step}, rounds, warm=0)
    while len(eager.losses) < steps:
        eager.step()
    return Pairs(taken["ours"], taken["eager"])


def fresh(shape: Shape) -> tuple[GPT, torch.optim.Optimizer]:
    """The same parameters, and the same random numbers after them, each time."""
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
    """The median, and the middle half."""
    low, median, high = middle(seconds)
    return f"{median:.2f} s", f"{low:.2f}-{high:.2f} s"


def finish(eager: Run, ours: Run, budget: int, digests: tuple[str, str]) -> None:
    """Say whether the promise was kept; the exit status does, too."""
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
    """Bars that move with each step and show its loss: one for each name that is asked for."""
    loss, count, clock = TextColumn("{task.fields[loss]}"), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(TextColumn("{task.description:9}"), BarColumn(), count, loss, clock, console=console) as bars:

        def bar(name: str) -> Callable[[float], None]:
            task = bars.add_task(name, total=steps, loss="")
            return lambda loss: bars.update(task, advance=1, loss=f"loss {loss:.4f}")

        yield bar


if __name__ == "__main__":
    typer.run(main)
