"""The example of the README trains, and goes on where it was, on other ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def printed(ranks: int, *arguments: object) -> list[str]:
    """Run the example with torchrun on so many processes; return its output."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    command = [*run, "-m", "benchmarks.train_gpt", *arguments, "--layers", 1, "--width", 16, "--size", 1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        list(map(str, command)), cwd=ROOT, env=environment, check=True, capture_output=True, text=True
    ).stdout.splitlines()


@pytest.mark.slow
def test_a_gpt_is_trained_by_one_command_and_goes_on_on_other_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "gpt"
    first = printed(2, "--steps", 2, "--every", 1, "--folder", folder)
    again = printed(2, "--steps", 3, "--folder", folder)
    alone = printed(1, "--steps", 4, "--folder", folder)
    whole = printed(2, "--steps", 3, "--folder", tmp_path / "whole")
    assert [line.split("  ")[0] for line in first + again + alone] == ["step 1", "step 2", "step 3", "step 4"]
    assert first + again == whole
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2", "3", "4"]
