"""Train with three places for values: the device, host memory behind it, and a disk behind that.

    python -m benchmarks.tiers [--budget 0.5] [--host 4] [--steps 10] [--layers 24] [--width 1024]

A chain of Linear layers is trained with AdamW: by the plain loop, under the budget with a disk alone, and under the
same budget with host memory and a disk, all in bytes a parameter and each in a process of its own.  Parameters and
states have to be the same bits; bytes of the device are counted by tests/support/allocator_meter.py, and those of host
memory and disk by this process, which reads the files that the other one has open.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated
from unittest.mock import patch

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.optimizers import Trained, Training
from benchmarks.records import write
from benchmarks.sides import Side
from passes.schedule.tier_choice import tier_nbytes
from tests.support.allocator_meter import preloaded

COLUMNS = ("places", "bits", "device MB", "forecast", "budget", "host MB", "forecast", "of", "disk MB", "forecast", "s")
BLOCK = 512  # bytes, in which the kernel counts those of a file


@dataclass(frozen=True)
class Row:
    """The results of a training: seconds of its last step, and bytes measured and forecast of each place."""

    places: str
    equal: bool
    device: int
    device_forecast: int
    budget: int
    host: int
    host_forecast: int
    host_budget: int
    disk: int
    disk_forecast: int
    seconds: float

    @property
    def kept(self) -> bool:
        """Return True if each place has what is allowed at most, and what was forecast.

        A state stays on the tier of the first plan, so host memory and disk are compared with their sum.
        """
        device = self.device <= self.device_forecast <= self.budget
        beside = self.host + self.disk <= self.host_forecast + self.disk_forecast
        return device and beside and self.host <= self.host_budget and self.host_forecast <= self.host_budget


class TieredTraining(Training):
    """The training of `benchmarks.optimizers`, with host memory as a tier as well."""

    def train_within(self, steps: int, budget: int, host: int | None) -> tuple[Trained, dict[str, int]]:
        """Return what the steps left, and the bytes that the plan needs in each tier."""
        self.host = host
        found = self.train(steps, budget)
        if found.why:
            raise typer.BadParameter(found.why)
        plan = self.step.plan
        needed = tier_nbytes(plan.plan, plan.choice.captured.trace)
        names = {tier.name if i else "": tier.name for i, tier in enumerate(plan.machine.tiers)}
        return found, {names[tier]: nbytes for tier, nbytes in needed.items()}


def main(
    budget: Annotated[float, typer.Option(help="bytes a parameter on the device")] = 0.5,
    host: Annotated[float, typer.Option(help="bytes a parameter in host memory")] = 4.0,
    steps: int = 10,
    layers: int = 24,
    width: int = 1024,
) -> None:
    """Print one table, and write it; exit with 1 if bits differ, or a place has more than it should."""
    with Side(TieredTraining, "AdamW", layers, width) as side:
        count, plain = side.do("parameters"), side.do("train", steps, None)
    rows, allowed = list[Row](), int(host * count)
    with tempfile.TemporaryDirectory() as folder:
        counted = preloaded(Path(folder))
        for places, given in (("disk", None), ("host and disk", allowed)):
            with patch.dict(os.environ, counted), Side(TieredTraining, "AdamW", layers, width) as side:
                found, needed = side.do("train_within", steps, int(budget * count), given)
                memory, disk = open_nbytes(side.process)
            rows.append(
                Row(
                    places,
                    found.digest == plain.digest,
                    found.measured,
                    found.forecast,
                    int(budget * count),
                    memory,
                    needed.get("host", 0),
                    given or 0,
                    disk,
                    needed.get("disk", 0),
                    found.seconds,
                )
            )
    title = f"{count / 1e6:.1f}M parameters, AdamW, {budget:g} bytes a parameter, torch {torch.__version__}"
    table = Table(*COLUMNS, title=f"{title}, {torch.get_num_threads()} threads, plain {plain.seconds:.2f} s", box=None)
    for row in rows:
        table.add_row(*_cells(row))
    Console(width=150).print(table)
    write("tiers", f"{layers} layers of width {width}, {budget:g} and {host:g}", [asdict(row) for row in rows])
    raise typer.Exit(not all(row.kept and row.equal for row in rows))


def open_nbytes(process: int) -> tuple[int, int]:
    """Return the bytes of the nameless files that a process has open: those in memory, and those in folders."""
    memory = disk = 0
    seen = set[tuple[int, int]]()
    for entry in Path(f"/proc/{process}/fd").iterdir():
        target, facts = os.readlink(entry), entry.stat()
        if not target.endswith(" (deleted)") or (facts.st_dev, facts.st_ino) in seen:
            continue
        seen.add((facts.st_dev, facts.st_ino))
        if target.startswith("/memfd:memgraph"):
            memory += facts.st_blocks * BLOCK
        elif not target.startswith(("/memfd:", "/dev/")):
            disk += facts.st_blocks * BLOCK
    return memory, disk


def _cells(row: Row) -> list[str]:
    sizes = (
        row.device, row.device_forecast, row.budget, row.host, row.host_forecast, row.host_budget, row.disk,
        row.disk_forecast,
    )  # fmt: skip
    return [row.places, "equal" if row.equal else "UNEQUAL", *(f"{n / 1e6:.2f}" for n in sizes), f"{row.seconds:.2f}"]


if __name__ == "__main__":
    typer.run(main)
