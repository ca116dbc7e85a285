"""Random modules as Python source: the same for the same seed, on every machine.

    module = random_module(7)
    print(module.source)             # class Random(nn.Module): ... a failure is reproduced by pasting it
    model, inputs = module.made()

`module_of(["linear", "queue"])` has given pieces; `tests/support/beside_eager.py` trains one beside eager.
"""

from __future__ import annotations

import random
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.random_pieces import GROUPS, PIECES

# If two calls both use a weight twice, the order of their gradient sums differs from eager's.
SHARING = frozenset({"twice", "tied"})
SIZES = ((8, 16), (32, 8))  # rows and columns of what a module is called with: few, so that few ops have to be priced
SHARES = (0.5, 0.7, 0.85, 1.0)
INPUTS = 4
RETURNS = {  # of the last value, and any other: the loss comes first
    "loss": "loss",
    "pair": "loss, {x}",
    "detached": "loss, {x}.detach()",
    "dict": "dict(loss=loss, last={x}, other={z})",
    "views": "loss, {x}.t(), {x}[:2]",
    "view_of_written": "loss, out.detach(), out.view(-1)",
    "nested": "dict(loss=loss, rest=[{x}.detach(), ({z},)])",
    "none": "loss, None, 'text', {x}[0]",
}
LOSSES = ("{x}.square().mean()", "{x}.tanh().sum() + {z}.mean()", "F.mse_loss({x}, {z}.detach() + 1)")
LOOPS = ("plain", "accumulates", "called twice", "eval between", "input gradients")
HEADER = """import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

"""


@dataclass(frozen=True)
class RandomModule:
    """A module as source: its class is `Random`, and its one input is a matrix.

    Attributes:
        pieces: the names of its pieces, and of its return value.
        loop: the training loop, one of `LOOPS`.
        share: the budget is the resident bytes, and this share of the peak of eager's step above them.
    """

    seed: int
    source: str
    rows: int
    columns: int
    pieces: tuple[str, ...] = field(compare=False)
    loop: str = "plain"
    share: float = 0.6

    def made(self) -> tuple[nn.Module, list[Tensor]]:
        """Return the module, and inputs for some steps."""
        names: dict[str, Any] = {}
        exec(HEADER + self.source, names)
        torch.manual_seed(self.seed)
        model = names["Random"]()
        return model, [torch.randn(self.rows, self.columns) for _ in range(INPUTS)]


def random_module(seed: int) -> RandomModule:
    """Return the module of a seed."""
    chance = random.Random(seed)
    size, count = chance.choice(SIZES), chance.randint(1, 6)
    loop, share = chance.choice(("plain", *LOOPS)), chance.choice(SHARES)
    left_out = SHARING if loop == "called twice" else frozenset()
    pieces = ["linear", *(_drawn(chance, left_out) for _ in range(count))]
    return module_of(pieces, chance.choice(list(RETURNS)), loop, share, size, chance, seed)


def module_of(
    pieces: Sequence[str], returns: str = "loss", loop: str = "plain", share: float = 0.6,
    size: tuple[int, int] = SIZES[0], chance: random.Random | None = None, seed: int = 0,
) -> RandomModule:  # fmt: skip
    """Return a module of these pieces; each reads the one before, or by `chance` any earlier one."""
    chance = chance or random.Random(seed)
    rows, columns = size
    sizes = {"n": rows, "w": columns, "h": columns // 2, "q": columns // 4}
    init: list[str] = []
    forward: list[str] = []
    values = ["x"]
    for i, name in enumerate(pieces):
        last = values[-1] if chance.random() < 0.8 else chance.choice(values)
        here = {**sizes, "x": last, "z": chance.choice(values), "y": f"v{i}", "m": f"m{i}"}
        for lines, text in zip((init, forward), PIECES[name], strict=True):
            lines += text.format(**here).splitlines()
        values.append(f"v{i}")
    forward += _ending(chance, returns, values)
    return RandomModule(seed, _class(init, forward), rows, columns, (*pieces, returns), loop, share)


def _drawn(chance: random.Random, left_out: frozenset[str]) -> str:
    group = chance.choice(sorted(GROUPS))
    return chance.choice([name for name in GROUPS[group] if name not in left_out])


def _ending(chance: random.Random, returns: str, values: Sequence[str]) -> list[str]:
    x, z = values[-1], chance.choice(values[1:])
    lines = []
    if returns == "view_of_written":
        lines += [f"out = {x}.clone()", "out[0] = 0", "loss = out.square().mean() + v0.mean()"]
    else:
        lines.append(f"loss = {chance.choice(LOSSES).format(x=x, z=z)} + v0.mean()")
    return [*lines, f"return {RETURNS[returns].format(x=x, z=z)}"]


def _class(init: Sequence[str], forward: Sequence[str]) -> str:
    parts = ["class Random(nn.Module):", "    def __init__(self):"]
    parts += [textwrap.indent(line, " " * 8) for line in ("super().__init__()", *init)]
    parts.append("    def forward(self, x):")
    return "\n".join([*parts, *(textwrap.indent(line, " " * 8) for line in forward)]) + "\n"
