"""Ctrl-C ends a search: a real signal to a real process, while HiGHS searches."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

FACTORY = """
import torch
from torch import nn

def setup():
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(64, 4, 256, batch_first=True, dropout=0.0) for _ in range(8)]
    return {"model": nn.Sequential(*layers), "args": (torch.randn(8, 64, 64),), "loss": lambda y: y.square().mean()}
"""
BUDGET = "5.3MB"  # for which HiGHS searches for half a minute, and has a plan after a second
CAPTURED = "memgraph: captured "  # the line before the search
SEARCHES = "planning, passes tried, 0 of"  # a line that comes every few seconds while the first pass runs, HiGHS
PATIENCE = 120  # seconds after which the process has not ended at the signal


def interrupted(folder: Path, line: str, count: int = 1) -> tuple[int, str, str]:
    """Plan, and press Ctrl-C when such a line has come so often; return exit code, stdout and stderr."""
    (file := folder / "factory_of_interrupt.py").write_text(FACTORY)
    command = [sys.executable, "-m", "memgraph", "plan", f"{file}:setup", "--budget", BUDGET]
    process = subprocess.Popen(
        [*command, "--offload", "none", "--time-limit", "3600"],
        env={**os.environ, "MEMGRAPH_DEBUG": "2"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    said = []
    try:
        for each in process.stderr:
            said.append(each)
            count -= line in each
            if not count:
                break
        process.send_signal(signal.SIGINT)
        out, rest = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    return process.returncode, out, "".join(said) + rest


@pytest.mark.long
def test_the_best_plan_so_far_is_taken(tmp_path: Path) -> None:
    for count in (2, 4, 8, 16):
        code, out, said = interrupted(tmp_path, SEARCHES, count)
        if code != 130:  # as where a busy machine has no plan yet
            break
    if said.count(SEARCHES) < count:
        pytest.skip("the search ended before it was interrupted")
    assert (code, out.startswith("fits: ")) == (0, True), said
    assert "planning was interrupted: this is the best plan until then" in out
    assert "interrupt again to stop" in said


@pytest.mark.long
def test_without_a_plan_the_exit_code_is_130(tmp_path: Path) -> None:
    code, out, said = interrupted(tmp_path, CAPTURED)
    assert (code, out) == (130, ""), said
    assert "interrupted" in said
