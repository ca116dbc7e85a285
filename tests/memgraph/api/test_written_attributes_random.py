"""Random forwards that read and write attributes: each call gives and leaves eager's bits, or is refused."""

from __future__ import annotations

import copy
import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import memgraph
from tests.support.compare import ROOM

MODULES = 40
CALLS = 9
WRITES = (
    "m.table[rows] = len(m.table)", "m.table.setdefault(rows, len(m.table))", "m.table['latest'] = rows",
    "m.table.pop(rows - 1, None)", "m.table['n'] = m.table.get('n', 0) + 1", "m.listed[:] = [rows]",
    "m.listed.append(rows) if rows not in m.listed else None", "m.seen.add(rows)", "m.pair = (rows,)",
    "m.pair = m.pair or (rows,)", "m.held.size = rows", "m.held.size = m.held.size or rows",
    "m.held.largest = max(m.held.largest or 0, rows)", "m.held.shape = torch.Size((rows,))", "m.held.odd = rows % 2",
    "m.held.table = {**m.held.table, rows: len(m.held.table)}", "m.late = getattr(m, 'late', None) or [rows]",
    "m.last = y.detach()", "m.sums = (y.detach().sum(), {'mean': y.detach().mean()})", "m.kept[:] = [y.detach().amax()]",
    "m.mean = 0.5 * m.mean + 0.5 * y.detach().mean()", "m.table['tensor'] = y.detach().sum()",
    "m.held.tensor = y.detach().sum()", "m.first = m.first if torch.is_tensor(m.first) else y.detach().sum()",
    "m.level = y.detach().mean().item()", "m.auxiliary = y.sum()",
)  # fmt: skip
READS = (
    "len(m.table)", "m.table.get(rows, 5)", "m.table.get('latest', 1)", "len(m.listed)", "(m.listed or [2])[0]",
    "len(m.seen)", "(m.pair or (3,))[0]", "(m.held.size or 1)", "(m.held.largest or 0)", "(m.held.shape or (1,))[0]",
    "(m.held.odd or 0)", "len(m.held.table)", "m.held.table.get(rows, 4)", "getattr(m, 'late', [7])[-1]", "1",
    "m.sums[0]", "m.sums[1]['mean']", "sum(m.kept)", "m.mean", "m.table.get('tensor', 2)", "(m.held.tensor or 1)",
    "m.first", "len(getattr(m, 'last', [1]))",
)  # fmt: skip
CONDITIONS = ("True", "rows > 4", "rows % 2", "m.training", "len(m.table) < 2", "rows not in m.table")


class Stateful(nn.Module):
    """Writes to attributes, scales by what it reads there, and writes again."""

    def __init__(self, random_numbers: random.Random) -> None:
        super().__init__()
        self.body = nn.Linear(3, 3)
        self.table: dict[Any, int] = {}
        self.listed: list[int] = []
        self.seen: set[int] = set()
        self.pair: Any = None
        self.held = SimpleNamespace(size=None, largest=None, table={}, shape=None, odd=None, tensor=None)
        self.sums: Any = (2.0, {"mean": 3.0})
        self.kept: list[Tensor] = []
        self.mean: Any = torch.ones(())
        self.first: Any = 1.5
        choose = random_numbers.choice
        self.before, self.after = (
            "\n".join(f"if {choose(CONDITIONS)}: {choose(WRITES)}" for _ in range(random_numbers.randint(0, most)))
            for most in (2, 1)
        )
        self.scale = "+".join(choose(READS) for _ in range(random_numbers.randint(1, 2)))

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        own, names = {"torch": torch}, {"m": self, "rows": x.shape[0], "y": y}
        exec(self.before, own, names)
        scale = eval(self.scale, own, names)
        exec(self.after, own, names)
        return y * scale


@pytest.mark.long
def test_random_forwards_give_eagers_bits_or_are_refused() -> None:
    ends = Counter(_end(seed) for seed in range(MODULES))
    assert ends["same"] > MODULES / 2 and ends["refused"] > 0, ends


def left(module: nn.Module) -> list[Tensor]:
    """Return all that its attributes hold, as tensors."""
    own = {name: value for name, value in vars(module).items() if name[0] != "_"}
    own |= {"held": vars(own["held"]), "texts": None}
    leaves = pytree.tree_leaves({name: value for name, value in own.items() if not isinstance(value, str)})
    leaves = [each for leaf in leaves for each in (sorted(leaf) if isinstance(leaf, set) else [leaf])]
    return [torch.as_tensor(leaf) for leaf in leaves if leaf is not None]


def _end(seed: int) -> str:
    """Train a random module beside eager, and return how that ended."""
    torch.manual_seed(0)
    numbers = random.Random(seed)
    plain = Stateful(numbers)
    ours = copy.deepcopy(plain)
    compiled = memgraph.compile(ours, ROOM)
    for _ in range(CALLS):
        rows, training = numbers.randint(2, 7), numbers.random() < 0.8
        x = torch.linspace(-1, 1, 3 * rows).view(rows, 3)
        plain.train(training)
        compiled.train(training)
        try:
            expected = plain(x)
        except (KeyError, AttributeError):
            return "fails in eager"
        try:
            found = compiled(x)
        except memgraph.CaptureError:
            return "refused"
        for module, y in ((plain, expected), (ours, found)):
            module.zero_grad()
            y.square().sum().backward()
        pairs = [
            (expected, found),
            *((a.grad, b.grad) for a, b in zip(plain.parameters(), ours.parameters(), strict=True)),
        ]
        pairs += zip(left(plain), left(ours), strict=True)
        assert all(torch.equal(*pair) for pair in pairs), (seed, plain.before, plain.scale, plain.after, rows)
    return "same"
