"""The smoke of a GPU: each case has a process and a time of its own, and a line whatever becomes of it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import smoke, smoke_cases
from benchmarks.smoke_cases import Norms, WrongError, norms

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
ABOUT = "A GPU", "2.0", "3.0"
FATES = """
import os, signal, sys, time
if sys.argv[1] == "crash": os.kill(os.getpid(), signal.SIGSEGV)
if sys.argv[1] == "hang": time.sleep(600)
if sys.argv[1] == "wrong": raise ValueError("the bits differ")
print("noise"); print("3 MB of 4")
"""


def test_every_case_is_there() -> None:
    assert all(callable(getattr(smoke_cases, case)) and getattr(smoke_cases, case).__doc__ for case in smoke.CASES)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_cuda_device_it_says_so_in_a_line() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "benchmarks.smoke"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert found.returncode == 1 and found.stdout == ""
    assert found.stderr.startswith("the smoke wants a CUDA device, and the torch of ") and found.stderr.count("\n") == 1


def test_a_crash_and_a_hang_are_lines_and_take_no_other_case_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "fates.py"
    script.write_text(FATES)
    monkeypatch.setattr(smoke, "COMMAND", (sys.executable, str(script)))
    begin = time.monotonic()
    lines = {line.case: line for line in smoke.run(["crash", "hang", "wrong", "right"], ABOUT, 5.0, tmp_path)}
    assert time.monotonic() - begin < 300  # not the ten minutes that one wants
    assert {case: (line.ok, line.found) for case, line in lines.items()} == {
        "crash": (False, "ended by SIGSEGV"),
        "hang": (False, "has not ended in its time"),
        "wrong": (False, "ValueError: the bits differ"),
        "right": (True, "3 MB of 4"),
    }
    (file,) = (tmp_path / "a-gpu").iterdir()
    written = [json.loads(line) for line in file.read_text().splitlines()]
    shown = capsys.readouterr().out.splitlines()
    assert [one["case"] for one in written] == [line.split()[1] for line in shown] and len(written) == 4
    assert all((one["device"], one["torch"], one["triton"]) == ABOUT for one in written)


def test_a_case_compares_buffers_and_bytes_with_eagers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert norms(CPU).endswith("bits as eager's")
    report = SimpleNamespace(measured=5, peak=5, budget=5)
    facts = iter([[torch.zeros(2)], [torch.ones(2)]])
    monkeypatch.setattr(smoke_cases, "_trained", lambda *_: (next(facts), report))
    with pytest.raises(WrongError, match="results differ from eager's by up to 1"):
        smoke_cases._compared(Norms, torch.zeros(1), CPU, 5)
    report.measured, facts = 6, iter([[torch.zeros(2)]] * 2)
    with pytest.raises(WrongError, match="of a budget of 5"):
        smoke_cases._compared(Norms, torch.zeros(1), CPU, 5)
