"""The stages of `make gpu`: each unit has a process, a time and a line of its own, and a stage goes on where it stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu, stages
from benchmarks.stages import LEFT, STAGES, TRIES, Log, Unit, run

ROOT = Path(__file__).parents[2]
ABOUT = ("A GPU", "2.0", "3.0")
FATES = {
    "right": "print('noise'); print('3 passed')",
    "wrong": "raise ValueError('the bits differ')",
    "crash": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    "hang": "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print('began', flush=True); time.sleep(600)",
    "slow": "import time; time.sleep(600)",
}
SLEEPS = "import os, time; open('{}', 'a').write(f'{{os.getpid()}} '); time.sleep(60)"


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Log:
    monkeypatch.setattr(stages, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(stages, "SPARE", 0.5)
    return Log(tmp_path / "a-gpu" / "stages.jsonl", ABOUT)


def units(*names: str, seconds: float = 60.0, least: float = 0.1) -> list[Unit]:
    return [Unit(name, ("-c", FATES[name]), seconds, least) for name in names]


def lines(log: Log) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.path.read_text().splitlines() if line]


def soon(seconds: float = 300.0) -> float:
    return time.monotonic() + seconds


def test_a_unit_that_dies_or_hangs_has_a_line_and_takes_no_other_with_it(
    log: Log, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hanging = units("hang", seconds=2.0)
    assert run("tests", [*units("crash"), *hanging, *units("wrong", "right")], log, soon()) == 1
    found = {line["unit"]: line["found"] for line in lines(log) if "ok" in line}
    logs = tmp_path / "cache" / "logs"
    assert found["crash"].startswith(f"ended by SIGSEGV; {logs / 'crash.txt'} has what it said")
    assert found["hang"] == f"has not ended in its time; {logs / 'hang.txt'} has what it said"
    assert found["wrong"].startswith("ended with 1; ") and found["wrong"].endswith("ValueError: the bits differ")
    assert found["right"] == "3 passed" and (logs / "hang.txt").read_text() == "began\n"
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in shown] == [
        ["FAILED", "tests", "crash"], ["FAILED", "tests", "hang"], ["FAILED", "tests", "wrong"], ["ok", "tests", "right"],
    ]  # fmt: skip


def test_a_stage_goes_on_with_what_has_no_line_and_keeps_what_failed(log: Log) -> None:
    assert run("tests", units("wrong", "right"), log, soon()) == 1
    count = len(lines(log))
    assert run("tests", units("wrong", "right"), log, soon()) == 1 and len(lines(log)) == count
    assert run("tests", units("right", "crash"), log, soon()) == 1
    assert [line["unit"] for line in lines(log)[count:]] == ["crash", "crash"]  # begun, ended
    assert run("kernels", units("right"), log, soon()) == 0  # another stage has lines of its own
    assert run("tests", units("right"), log, soon(), again=True) == 0
    assert [line["unit"] for line in lines(log)[-2:]] == ["right", "right"]


def test_what_there_is_no_time_for_is_left_to_the_next_call(log: Log, capsys: pytest.CaptureFixture[str]) -> None:
    late = units("slow", least=100.0)
    assert run("tests", [*units("right"), *late], log, soon(60.0)) == LEFT
    assert "no time for slow: the same command goes on" in capsys.readouterr().out
    assert {line["unit"] for line in lines(log)} == {"right"}


def test_a_unit_gets_no_more_time_than_its_stage_has(log: Log) -> None:
    begin = time.monotonic()
    assert run("tests", units("slow", seconds=600.0), log, time.monotonic() + 3.0) == 1
    assert time.monotonic() - begin < 60


def test_a_unit_that_measures_is_told_how_long(log: Log) -> None:
    """It would be stopped, and count as failed, if its own limit were above what is left of the stage's time."""
    told = Unit("told", ("-c", "import sys; print(sys.argv[1])", "{seconds}"), 500.0)
    assert run("figures", [told], log, soon(100.0)) == 0
    assert 60 <= float(lines(log)[-1]["found"]) <= 70
    assert {unit.command[-2:] for unit in STAGES["figures"]} == {("--seconds", "{seconds}")}


def test_lines_of_other_sources_do_not_count(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("tests", units("right"), log, soon()) == 0
    monkeypatch.setattr(stages, "_digest", lambda: "others")
    other = Log(log.path, ABOUT)
    assert run("tests", units("right"), other, soon()) == 0
    assert len(lines(log)) == 4


def test_a_stage_that_is_killed_leaves_its_lines_and_runs_the_unit_once_more(log: Log, tmp_path: Path) -> None:
    """As a machine that stops; the second time the unit has failed, and the others run all the same."""
    script = f"""
import sys, time
from pathlib import Path
from benchmarks import stages
stages.CACHE = Path({str(tmp_path / "cache")!r})
log = stages.Log(Path({str(log.path)!r}), {ABOUT!r})
right = stages.Unit("right", ("-c", "print('3 passed')"), 60.0, 0.1)
slow = stages.Unit("slow", ("-c", {SLEEPS.format(tmp_path / "sleepers")!r}), 60.0, 0.1)
print(stages.run("tests", [right, slow, stages.Unit("last", right.command, 60.0, 0.1)], log, time.monotonic() + 300))
"""

    for begun in range(1, TRIES + 1):
        stage = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        until = soon()
        while len(_words(tmp_path / "sleepers")) < begun and time.monotonic() < until:
            time.sleep(0.05)
        stage.kill()
        stage.communicate()
    with log.path.open("a") as file:
        file.write('\n{"stage": "tests", "unit": "la')  # the line that was being written
    for sleeper in _words(tmp_path / "sleepers"):  # units are processes of their own
        os.kill(int(sleeper), signal.SIGKILL)
    assert [line["unit"] for line in log.lines("tests") if "ok" in line] == ["right"]
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "1"
    found = {line["unit"]: line["ok"] for line in log.lines("tests") if "ok" in line}
    assert found == {"right": True, "last": True}
    assert f"has begun {TRIES} times and never ended" in done.stdout


def _words(path: Path) -> list[str]:
    return path.read_text().split() if path.is_file() else []


def test_every_stage_ends_within_nine_minutes_and_its_commands_exist() -> None:
    everything = [unit for stage in STAGES.values() for unit in stage]
    assert all(unit.least <= unit.seconds <= 540 - stages.SPARE for unit in everything)
    assert len({unit.name for unit in everything}) <= len(everything)
    parts = [unit.command[3] for unit in STAGES["figures"]]
    assert parts == [*gpu.PARTS]
    paths = [unit.command[-1] for stage in ("kernels", "tests") for unit in STAGES[stage]]
    assert all((ROOT / path).exists() for path in paths)
    assert {path for path in paths if "/test_" in path} == {
        f"tests/gpu/{path.name}" for path in (ROOT / "tests" / "gpu").glob("test_*.py")
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_cuda_device_a_stage_says_so_in_a_line() -> None:
    command = [sys.executable, "-m", "benchmarks.stages", "smoke"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 1 and found.stdout == ""
    assert found.stderr.startswith("a stage wants a CUDA device, and the torch of ") and found.stderr.count("\n") == 1


def test_make_gpu_runs_each_stage_whatever_became_of_the_others(tmp_path: Path) -> None:
    """By a Python that notes down how it is called, and fails."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/calls\nexit 75\n')
    python.chmod(0o755)
    made = subprocess.run(["make", "gpu", f"PYTHON={python}"], cwd=ROOT, capture_output=True, text=True)
    assert made.returncode != 0, made.stdout
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls == [f"-m benchmarks.stages {stage} --within 540" for stage in STAGES]
    subprocess.run(["make", "gpu-kernels", f"PYTHON={python}", "WITHIN_GPU=60"], cwd=ROOT, capture_output=True)
    assert (tmp_path / "calls").read_text().splitlines()[-1] == "-m benchmarks.stages kernels --within 60"
