"""The examples run as they stand, keep their budgets and print their plans."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RANKS = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("command", "planned"),
    [
        (["examples/huggingface.py"], "recompute|offload"),
        (["examples/larger_than_budget.py"], "stream"),
        ([*RANKS, "examples/two_ranks.py"], "recompute|offload|stream"),
    ],
    ids=["huggingface", "larger_than_budget", "two_ranks"],
)
def test_an_example_trains_within_its_budget(command: list[str], planned: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    report = run.stdout.partition("\nfits: ")[2]
    assert report, run.stdout
    decided = report.partition("\ndecided\n")[2]
    assert any(line.startswith(tuple(planned.split("|"))) for line in decided.splitlines()), report
