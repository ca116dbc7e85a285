"""Time a ResNet18 under budgets just below eager's peak, beside eager, in turn: a plan must cost no cliff.

    python -m benchmarks.cliff [--rounds 15]

Each budget is a share of eager's peak of a whole step, forward and backward of 8 images on one thread.  Every way has a
process of its own, in which the module is planned, measured, and perhaps planned again before it is timed.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import memgraph
from benchmarks.clock import Pairs, in_turn, loop_text, middle, peak, step_of
from benchmarks.peers.models import MODELS
from benchmarks.sides import Side

SHARES = (0.95, 0.8, 0.6)
WARM = 4  # steps before a plan is settled


def images() -> tuple[nn.Module, Mapping[str, Tensor]]:
    """Return the model and its batch, the same in each process."""
    torch.manual_seed(0)
    return MODELS["resnet"].make(), MODELS["resnet"].batch()


class ImageStep:
    """A step of eager, or of memgraph under a share of eager's peak."""

    def __init__(self, share: float | None) -> None:
        torch.set_num_threads(1)
        model, batch = images()
        self.called: nn.Module = model
        if share is not None:
            plain, _ = images()
            whole = peak(plain, batch.values(), step_of(plain, lambda: plain(**batch).loss))
            self.called = memgraph.compile(model, int(share * whole))
        self.run = step_of(model, lambda: self.called(**batch).loss)

    def ready(self) -> str:
        """Run the first steps, and say what the plan is."""
        for _ in range(WARM):
            self.run()
        if not isinstance(self.called, memgraph.CompiledModule):
            return "as it is"
        plan = self.called.plan
        return f"{plan.measured} of {plan.budget} bytes, {len(plan.plan)} decisions, forecast {plan.longer:+.1%}"


def main(rounds: Annotated[int, typer.Option(min=3, help="How often each step is timed.")] = 15) -> None:
    """Print the median of each way's ratio to eager, with the ends of its middle half."""
    table = Table("budget", "over eager", "middle half", "plan", box=None, title=loop_text(), title_justify="left")
    with ExitStack() as stack:
        sides = {share: stack.enter_context(Side(ImageStep, share)) for share in (None, *SHARES)}
        plans = {share: side.do("ready") for share, side in sides.items()}
        seconds = in_turn({str(share): partial(side.do, "run") for share, side in sides.items()}, rounds)
    for share in SHARES:
        low, median, high = middle(Pairs(seconds[str(share)], seconds[str(None)]).ratios)
        table.add_row(f"{share:.0%}", f"{median:.3f}", f"{low:.3f}-{high:.3f}", plans[share])
    Console(width=150).print(table)


if __name__ == "__main__":
    typer.run(main)
