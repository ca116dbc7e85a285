"""Running rows to see whether a batch may be split keeps to the budget, where it can."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import memgraph
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


def child() -> None:
    """Print the most of a first call, by the second meter."""
    allocator = Allocator()
    model, x = Wide(), torch.randn(512, 64)
    compiled = memgraph.compile(model, BUDGET, microbatches=8, reduction="mean")
    compiled(x).backward()
    print(allocator.most)


@pytest.mark.skipif(compiler() is None, reason="the second meter is compiled")
def test_a_first_call_in_micro_batches_is_within_its_budget(tmp_path: Path) -> None:
    code = "from tests.memgraph.microbatch.test_check_memory import child; child()"
    environment = preloaded(tmp_path) | {"MEMGRAPH_CACHE": "", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert BUDGET // 2 < int(ran.stdout) <= BUDGET


def test_a_batch_that_is_not_run_as_a_whole_is_checked_by_a_few_rows() -> None:
    compiled = memgraph.compile(OfTheBatch(), BUDGET, microbatches=8, reduction="mean")
    with pytest.raises(memgraph.CaptureError, match="reduction"):
        compiled(torch.randn(512, 64))


def test_a_few_rows_that_are_more_than_the_budget_leaves_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    compiled = memgraph.compile(Wide(), 1_300_000, microbatches=8, reduction="mean")
    with caplog.at_level(logging.WARNING, "memgraph"), pytest.raises(memgraph.BudgetError):
        compiled(torch.randn(512, 64))
    assert any("planning goes beyond the budget: 10 rows of Wide are run" in each for each in caplog.messages)
