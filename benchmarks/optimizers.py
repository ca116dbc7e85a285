"""Train with each optimizer while its states are on disk: bits, bytes by a second meter, and where they are.

    python -m benchmarks.optimizers [NAME ...] [--per 1.5 --per 1 --per 0.3] [--layers 24] [--width 1024]

A chain of Linear layers is trained ten steps with a learning rate that changes, by the plain loop and under a budget
of so many bytes a parameter, each in a process of its own. Parameters and all tensors of the states have to be the same
bits, and measured <= forecast <= budget, where the bytes are counted by tests/support/allocator_meter.py. Where no plan
fits, the table has the smallest budget. It is written to results/optimizers.json and docs/optimizers.md.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import import_module
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any
from unittest.mock import patch

import torch
import typer
from rich.console import Console
from torch import Tensor, nn, optim
from torch.utils._pytree import tree_leaves

import memgraph
from benchmarks.records import FOLDER, surroundings, write
from benchmarks.sides import Side
from memgraph.optim.update_unit import unit_of
from tests.support.allocator_meter import Allocator, preloaded
from tests.support.other_optimizers import muon_and_adamw

PAGE = Path(__file__).parents[1] / "docs" / "optimizers.md"
PER, BATCH, RATE = (1.5, 1.0, 0.3), 16, 1e-3
DEFAULT = "24 layers of width 1024"
BEGIN = "<!-- written by python -m benchmarks.optimizers -->"
Make = Callable[[Iterator[nn.Parameter]], optim.Optimizer]


def _of(library: str, name: str) -> Make:
    """Return a class of a library that is imported when it is used."""
    return lambda parameters: getattr(import_module(f"{library}.optim"), name)(parameters, lr=RATE)


def _ones(name: str, **options: Any) -> Make:
    return partial(getattr(optim, name), **{"lr": RATE, **options})


OPTIMIZERS: dict[str, Make] = {
    "SGD": _ones("SGD"),
    "SGD, momentum": _ones("SGD", momentum=0.9),
    "SGD, nesterov": _ones("SGD", momentum=0.9, nesterov=True),
    "Adam": _ones("Adam"),
    "AdamW": _ones("AdamW"),
    "AdamW, amsgrad": _ones("AdamW", amsgrad=True),
    "AdamW, foreach": _ones("AdamW", foreach=True),
    "AdamW, fused": _ones("AdamW", fused=True),
    "Adagrad": _ones("Adagrad"),
    "RMSprop": _ones("RMSprop"),
    "Adamax": _ones("Adamax"),
    "NAdam": _ones("NAdam"),
    "RAdam": _ones("RAdam"),
    "Adadelta": _ones("Adadelta"),
    "Rprop": _ones("Rprop"),
    "ASGD": _ones("ASGD"),
    "Adafactor": _ones("Adafactor"),
    "Muon": _ones("Muon"),
    "Muon and AdamW": muon_and_adamw,
    "AdamW8bit (torchao)": _of("torchao", "AdamW8bit"),
    "AdamW4bit (torchao)": _of("torchao", "AdamW4bit"),
    "AdamW8bit (bitsandbytes)": _of("bitsandbytes", "AdamW8bit"),
    "Lion8bit (bitsandbytes)": _of("bitsandbytes", "Lion8bit"),
}


class Net(nn.Module):
    """A chain of Linear layers, whose loss is the mean square of its result."""

    def __init__(self, layers: int, width: int, bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return x.square().mean()


@dataclass(frozen=True)
class Trained:
    """The results of some steps: a digest of parameters and states, and the bytes of a step."""

    digest: str
    measured: int = 0
    forecast: int = 0
    seconds: float = 0.0
    why: str = ""  # nothing was trained
    smallest: int = 0  # budget, where there is no plan


class Training:
    """A net that is trained with an optimizer; with a budget by memgraph, whose bytes are counted."""

    def __init__(self, name: str, layers: int, width: int) -> None:
        self.allocator = Allocator() if "LD_PRELOAD" in os.environ else None  # before any tensor exists
        torch.manual_seed(0)
        self.net: Any = Net(layers, width, bias=name != "Muon")  # which takes matrices only
        self.optimizer = OPTIMIZERS[name](self.net.parameters())
        self.batch = torch.randn(BATCH, width)
        self.host: int | None = None  # bytes of host memory as a tier

    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.net.parameters())

    def train(self, steps: int, budget: int | None) -> Trained:
        """Return what the steps left; the bytes are those of all but the first three."""
        self.step = step = self.net
        if budget is not None:
            step = memgraph.compile(self.net, budget, optimizer=self.optimizer, time_limit=0, host=self.host)
            self.step = step
        most, seconds = 0, 0.0
        try:
            for i in range(steps):
                if i == min(3, steps - 1):
                    self._reset()
                seconds = self._step(step, i)
        except memgraph.BudgetError as error:
            return Trained("", why=str(error), smallest=error.smallest or 0)
        if self.allocator is not None and budget is not None:
            staging = int(step.plan.forecast.by_kind["staging"].max(initial=0))  # which are no tensors
            most = self.allocator.most + staging
        return Trained(self._digest(), most, 0 if budget is None else step.plan.peak, seconds)

    def _reset(self) -> None:
        gc.collect()
        if self.allocator is not None:
            self.allocator.reset()

    def _step(self, step: Callable[[Tensor], Tensor], number: int) -> float:
        for group in chain.from_iterable(each.param_groups for each in _parts(self.optimizer)):
            if isinstance(group["lr"], Tensor):  # torchao's
                group["lr"].fill_(RATE * (1 + number % 3))
            else:
                group["lr"] = RATE * (1 + number % 3)
        begin = perf_counter()
        step(self.batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return perf_counter() - begin

    def _digest(self) -> str:
        """Return a digest of all bytes of parameters and states."""
        digest = hashlib.sha256()
        states = [each.state.get(p, {}) for each in _parts(self.optimizer) for p in self.net.parameters()]
        for leaf in chain(self.net.parameters(), tree_leaves(states)):
            for plain in _plain(leaf):
                digest.update(plain.detach().contiguous().flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest()


@dataclass
class Row:
    """An optimizer: its results at each number of bytes a parameter."""

    optimizer: str
    parameters: int
    unit: str
    plain_seconds: float
    budgets: dict[str, Trained] = field(default_factory=dict)
    equal: dict[str, bool] = field(default_factory=dict)

    @property
    def line(self) -> str:
        """The row of the table, in Markdown."""
        return f"| {self.optimizer} | {self.unit} | " + " | ".join(map(self.cell, self.budgets)) + " |"

    def cell(self, per: str) -> str:
        """Return what the table has for a budget."""
        if (found := self.budgets[per]).why:
            return f"none: from {found.smallest / self.parameters:.2f}" if found.smallest else "none"
        kept = found.measured <= found.forecast <= float(per) * self.parameters
        words = ["equal" if self.equal[per] else "UNEQUAL", f"{found.measured / self.parameters:.2f}"]
        return ", ".join([*words, *["OVER"] * (not kept)])


def main(
    names: Annotated[list[str] | None, typer.Argument()] = None,
    per: Annotated[list[float] | None, typer.Option()] = None,
    steps: int = 10,
    layers: int = 24,
    width: int = 1024,
) -> None:
    """Print one table, with rows of earlier runs, and write it; exit with 1 if bits differ or a budget is broken."""
    rows, console = list[Row](), Console(stderr=True)
    with tempfile.TemporaryDirectory() as folder:
        counted = preloaded(Path(folder))
        for name in names or OPTIMIZERS:
            rows.append(row := row_of(name, per or PER, (steps, layers, width), counted))
            console.print(f"{name}: " + "; ".join(f"{each}: {row.cell(each)}" for each in row.budgets))
    part = f"{layers} layers of width {width}"
    found = {row.optimizer: row for row in (*kept(part), *rows)}
    every = [found[name] for name in OPTIMIZERS if name in found]
    print(text := page(every, steps, layers, width))
    if part == DEFAULT and not per:
        write("optimizers", part, [asdict(row) for row in every])
        PAGE.write_text(PAGE.read_text().partition(BEGIN)[0] + BEGIN + "\n\n" + text)
    cells = [row.cell(each) for row in rows for each in row.budgets]
    raise typer.Exit(any("UNEQUAL" in cell or "OVER" in cell for cell in cells))


def kept(part: str) -> list[Row]:
    """Return the rows of earlier runs of these sizes."""
    path = FOLDER / "optimizers.json"
    found = json.loads(path.read_text()).get(part, {"rows": []}) if path.is_file() else {"rows": []}
    return [
        Row(**{**row, "budgets": {per: Trained(**each) for per, each in row["budgets"].items()}})
        for row in found["rows"]
    ]


def row_of(name: str, per: Iterable[float], sizes: tuple[int, int, int], counted: Mapping[str, str]) -> Row:
    """Train in a process for each budget, and one without; `sizes` are steps, layers and width."""
    steps, layers, width = sizes
    small = Training(name, 2, 64)
    unit = "; ".join(dict.fromkeys(unit_of(each).name.lower() for each in _parts(small.optimizer)))
    with Side(Training, name, layers, width) as side:
        count, plain = side.do("parameters"), side.do("train", steps, None)
    row = Row(name, count, unit, plain.seconds)
    for each in per:
        with patch.dict(os.environ, counted), Side(Training, name, layers, width) as side:
            found = side.do("train", steps, int(each * count))
        row.budgets[f"{each:g}"], row.equal[f"{each:g}"] = found, found.digest == plain.digest
    return row


def page(rows: list[Row], steps: int, layers: int, width: int) -> str:
    """Return the table in Markdown."""
    about = surroundings("optimizers")
    heads = [f"{each} B a parameter" for each in rows[0].budgets]
    lines = [
        f"{about['date'][:10]} at {about['commit']}, torch {about['torch']}: {layers} Linear layers of width {width}, "
        f"{rows[0].parameters / 1e6:.1f}M parameters, {steps} steps. Each cell: the bits beside the plain loop's, and "
        "measured bytes a parameter.",
        "",
        "| optimizer | unit | " + " | ".join(heads) + " |",
        "|---" * (2 + len(heads)) + "|",
    ]
    return "\n".join([*lines, *(row.line for row in rows)]) + "\n"


def _parts(optimizer: optim.Optimizer) -> list[optim.Optimizer]:
    return getattr(optimizer, "optimizers", [optimizer])


def _plain(leaf: object) -> Iterator[Tensor]:
    """Return the plain tensors that a tensor is made of, or the number as a tensor."""
    if isinstance(leaf, Tensor) and hasattr(leaf, "__tensor_flatten__"):
        for name in leaf.__tensor_flatten__()[0]:
            yield from _plain(getattr(leaf, name))
    elif isinstance(leaf, Tensor):
        yield leaf
    elif isinstance(leaf, int | float):
        yield torch.tensor(float(leaf))


if __name__ == "__main__":
    typer.run(main)
