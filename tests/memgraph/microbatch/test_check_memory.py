"""Running rows to see whether a batch may be split keeps to the budget, where it can."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import memgraph
from memgraph.microbatch.check_independence import require_row_independence
from memgraph.microbatch.microbatches import MicroBatches
from tests.support.allocator_meter import Allocator, compiler, preloaded

ROOT = Path(__file__).parents[3]
BUDGET = 12_000_000


class Wide(nn.Module):
    """Forward of 512 rows takes 16.8 MB, and that of 64 rows 2.1 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 4096), nn.Linear(4096, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu()).square().mean()


class OfTheBatch(Wide):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


class Logits(nn.Module):
    """Results of a row take 262 kB: a few of them are compared with one another."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 8), nn.Linear(8, 4096)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens))


class Filter(nn.Module):
    """Convolutions have a workspace, which no forecast from shapes counts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


# Each room is less than the check once took without a warning; the rows of the last batch alone take 1.6 MB.
CHECKS: tuple[tuple[Callable[[], nn.Module], Callable[[], Tensor], str | None, int], ...] = (
    (Logits, lambda: torch.randint(64, (64, 16)), None, 8_600_000),
    (Filter, lambda: torch.randn(64, 3, 16, 16), "mean", 2_560_000),
    (lambda: nn.Linear(256, 256), lambda: torch.randn(200, 8, 256), None, 760_000),
)


def check_child() -> None:
    """Print what each check takes beside its module and its batch, by the second meter."""
    allocator = Allocator()
    for make, batch, reduction, room in CHECKS:
        split, x = MicroBatches(make(), 8, reduction), batch()
        before = allocator.now
        allocator.reset()
        require_row_independence(split, (x,), {}, torch.device("cpu"), room)
        print(allocator.most - before)


def child() -> None:
    """Print the most of a first call, by the second meter."""
    allocator = Allocator()
    model, x = Wide(), torch.randn(512, 64)
    compiled = memgraph.compile(model, BUDGET, microbatches=8, reduction="mean")
    compiled(x).backward()
    print(allocator.most)


def counted(function: Callable[[], None], folder: Path) -> list[int]:
    """Return the bytes that a function of this file prints in a process that the second meter counts."""
    code = f"from {__name__} import {function.__name__} as run; run()"
    environment = preloaded(folder) | {"MEMGRAPH_CACHE": "", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return list(map(int, ran.stdout.split()))


@pytest.mark.long
@pytest.mark.skipif(compiler() is None, reason="the second meter is compiled")
def test_a_first_call_in_micro_batches_is_within_its_budget(tmp_path: Path) -> None:
    (most,) = counted(child, tmp_path)
    assert BUDGET // 2 < most <= BUDGET


@pytest.mark.long
@pytest.mark.skipif(compiler() is None, reason="the second meter is compiled")
def test_comparisons_workspaces_and_rows_count(tmp_path: Path) -> None:
    taken = counted(check_child, tmp_path)
    assert all(0 < nbytes <= room for nbytes, (*_, room) in zip(taken, CHECKS, strict=True)), taken


def test_a_batch_that_is_not_run_as_a_whole_is_checked_by_a_few_rows() -> None:
    compiled = memgraph.compile(OfTheBatch(), BUDGET, microbatches=8, reduction="mean")
    with pytest.raises(memgraph.CaptureError, match="reduction"):
        compiled(torch.randn(512, 64))


@pytest.mark.long
def test_a_few_rows_that_are_more_than_the_budget_leaves_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    compiled = memgraph.compile(Wide(), 1_300_000, microbatches=8, reduction="mean")
    with caplog.at_level(logging.WARNING, "memgraph"), pytest.raises(memgraph.BudgetError):
        compiled(torch.randn(512, 64))
    assert any("planning goes beyond the budget: 10 rows of Wide are run" in each for each in caplog.messages)
