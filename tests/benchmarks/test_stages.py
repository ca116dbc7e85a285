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

from benchmarks import gpu, stage_log, stages
from benchmarks.stage_log import LATE, LEFT, TRIES, Log
from benchmarks.stages import STAGES, Unit, run

ROOT = Path(__file__).parents[2]
ABOUT = ("A GPU", "2.0", "3.0")
FATES = {
    "right": "print('noise'); print('3 passed')",
    "wrong": "raise ValueError('the bits differ')",
    "crash": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    "hang": "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print('began', flush=True); time.sleep(600)",
    "slow": "import time; time.sleep(600)",
    "late": "import sys; print('no time for a row'); sys.exit(75)",
    "fault": (
        "import sys; print('ours', file=sys.stderr)\nraise RuntimeError('CUDA error: an illegal access\\nSearch for it')"
    ),
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
    assert found["hang"] == f"has not ended in its 2 s; {logs / 'hang.txt'} has what it said"
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


def test_what_has_failed_runs_again_and_what_is_asked_for(log: Log, capsys: pytest.CaptureFixture[str]) -> None:
    """A failed unit could be run again by --again alone, with the whole stage, and nothing said so."""
    for _ in range(TRIES):
        log.add("tests", "late")  # and the machine stopped
    assert run("tests", units("wrong", "right", "late"), log, soon()) == 1
    shown = capsys.readouterr().out.splitlines()
    says = "; `python -m benchmarks.stages tests --failed` repeats it"
    assert [line.endswith(says) for line in shown] == [True, False, True], shown
    for repeat, began in [("failed", ["wrong", "late"]), ("all", ["wrong", "right", "late"]), ("", ["late"])]:
        count = len(lines(log))
        run("tests", units("wrong", "right", "late"), log, soon(), repeat)
        assert [line["unit"] for line in lines(log)[count:] if not {"again", "ok", "undone"} & set(line)] == began


def test_what_there_is_no_time_for_is_left_to_the_next_call(log: Log, capsys: pytest.CaptureFixture[str]) -> None:
    late = units("slow", least=100.0)
    assert run("tests", [*units("right"), *late], log, soon(60.0)) == LEFT
    shown = capsys.readouterr().out
    assert "left: slow; `python -m benchmarks.stages tests` goes on with them" in shown
    assert {line["unit"] for line in lines(log)} == {"right"}
    assert "with --within 102 (make: WITHIN_GPU=102) or more, which slow wants" in shown  # and not for ever in vain


def test_a_unit_gets_no_more_time_than_its_stage_has(log: Log) -> None:
    begin = time.monotonic()
    assert run("tests", units("slow", seconds=600.0), log, time.monotonic() + 3.0) == LEFT
    assert time.monotonic() - begin < 60


@pytest.mark.long
def test_a_unit_that_the_end_of_its_stage_has_cut_runs_again_with_all_of_its_time(
    log: Log, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It counted as failed for good, though it had a tenth of its time."""
    waits = f"import os, time\nwhile not os.path.exists({str(tmp_path / 'more')!r}): time.sleep(0.1)\nprint('3 passed')"
    unit = Unit("once", ("-c", waits), 120.0, 0.1)
    for seconds, shown in [(4.0, "left    tests    once"), (30.0, "left: once;")]:  # the second call begins nothing
        assert run("tests", [unit], log, time.monotonic() + seconds) == LEFT
        said = capsys.readouterr().out
        assert said.startswith(shown) and "with --within 122 (make: WITHIN_GPU=122) or more, which once wants" in said
        assert [set(line) & {"ok", "undone"} for line in lines(log)] == [set(), {"undone"}]
    (tmp_path / "more").touch()
    assert run("tests", [unit], log, soon()) == 0


def test_a_unit_that_says_that_it_is_not_done_runs_again(log: Log, capsys: pytest.CaptureFixture[str]) -> None:
    """It is left to later calls where the stage has cut its time, and has failed if all of its time is too little twice."""
    for _ in range(TRIES + 1):
        assert run("figures", units("late", seconds=60.0), log, time.monotonic() + 50.0) == LEFT
    assert log.histories("figures")["late"].begun == 0
    for status in (*[LEFT] * (TRIES - 1), 1, 1):
        assert run("figures", units("late"), log, soon()) == status
    assert "is not done in its 60 s" in capsys.readouterr().out
    assert log.histories("figures")["late"].has_failed and LATE in [line.get("undone") for line in lines(log)]


def test_a_fault_is_said_by_its_exception_and_not_by_its_last_line(log: Log) -> None:
    assert run("figures", units("fault"), log, soon()) == 1
    assert lines(log)[-1]["found"].endswith("has what it said: RuntimeError: CUDA error: an illegal access")


def test_a_unit_that_measures_is_told_how_long(log: Log) -> None:
    """It would be stopped, and count as failed, if its own limit were above what is left of the stage's time."""
    told = Unit("told", ("-c", "import sys; print(sys.argv[1])", "{seconds}"), 500.0)
    assert run("figures", [told], log, soon(100.0)) == 0
    assert 60 <= float(lines(log)[-1]["found"]) <= 70
    assert {unit.command[-2:] for unit in STAGES["figures"]} == {("--seconds", "{seconds}")}


def test_lines_of_other_sources_do_not_count(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("tests", units("right"), log, soon()) == 0
    monkeypatch.setattr(stage_log, "digest", lambda: "others")
    other = Log(log.path, ABOUT)
    assert run("tests", units("right"), other, soon()) == 0
    assert len(lines(log)) == 4


def test_sources_are_those_that_the_units_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of tests/support, whose models the GPU's tests train, did not count."""
    monkeypatch.setattr(stage_log, "ROOT", tmp_path)
    (tmp_path / "tests" / "support").mkdir(parents=True)
    before = stage_log.digest()
    (tmp_path / "tests" / "support" / "models.py").write_text("1")
    assert stage_log.digest() != before


def test_lines_that_are_none_are_left_out(log: Log) -> None:
    assert run("tests", units("right"), log, soon()) == 0
    cut = json.dumps({**lines(log)[-1], "unit": "late"})[:-1].encode()
    kept = json.dumps({"stage": "tests", "unit": "wrong", "about": log.about, "ok": "yes"}).encode()
    with log.path.open("ab") as file:
        file.write(b"\n".join([b"", b"3", b"[]", b"null", b'{"a": 1}', b'"\xff\xfe', b"\x00", kept, cut, b""]))
    assert [*log.histories("tests")] == ["right"]
    assert run("tests", units("right"), log, soon()) == 0


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
    assert f"has begun {TRIES} times and was never done" in done.stdout


MAIN = """
import signal, sys
from pathlib import Path
from benchmarks import stages
stages.CACHE, stages.RESULTS = Path({cache!r}), Path({results!r})
stages.device_or_reason = lambda who: {about!r}
for one in stages.SIGNALS:
    signal.signal(one, signal.SIG_DFL)  # what runs the tests may ignore some
stages.STAGES = {{"tests": (stages.Unit("sleeps", ("-c", {sleeps!r}), 60.0, 0.1),)}}
sys.exit(stages.main())
"""


def main_command(tmp_path: Path, results: Path) -> list[str]:
    sleeps = SLEEPS.format(tmp_path / "sleepers")
    script = MAIN.format(cache=str(tmp_path / "cache"), results=str(results), about=ABOUT, sleeps=sleeps)
    return [sys.executable, "-c", script, "tests"]


def test_a_stage_that_is_stopped_takes_its_unit_with_it_and_does_not_count_it(tmp_path: Path) -> None:
    """The unit ran on; after two interrupts it counted as one that takes the machine with it."""
    for number, sent in enumerate((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), 1):
        command = main_command(tmp_path, tmp_path)
        stage = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        until = soon()
        while len(_words(tmp_path / "sleepers")) < number and time.monotonic() < until:
            time.sleep(0.05)
        stage.send_signal(sent)
        shown, _ = stage.communicate()
        assert stage.returncode == -sent
        assert f"was stopped by {sent.name}" in shown and "left: sleeps; `python -m benchmarks.stages tests`" in shown
        with pytest.raises(ProcessLookupError):
            os.kill(int(_words(tmp_path / "sleepers")[-1]), 0)
    history = Log(tmp_path / "a-gpu" / "stages.jsonl", ABOUT).histories("tests")["sleeps"]
    assert (history.begun, history.cut, history.result) == (0, False, None)


def test_a_stage_that_cannot_write_says_so_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "results").touch()  # root may write to any folder, but not to a file as to a folder
    command = main_command(tmp_path, tmp_path / "results")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr.startswith("a stage can't go on: ") and done.stderr.count("\n") == 1


def test_a_python_without_torch_comes_as_far_as_the_line_that_says_so() -> None:
    command = [sys.executable, "-S", "-c", "import benchmarks.stages, sys; print('torch' in sys.modules)"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "False\n", done.stderr


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


@pytest.mark.long
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
    command = ["make", "gpu-kernels", f"PYTHON={python}", "WITHIN_GPU=60", "AGAIN=--failed"]
    subprocess.run(command, cwd=ROOT, capture_output=True)
    assert (tmp_path / "calls").read_text().splitlines()[-1] == "-m benchmarks.stages kernels --within 60 --failed"


@pytest.mark.parametrize(
    "statuses, worst, count", [([75, 1, 75, 0, 75], 1, 5), ([0, 75, 0, 0, 0], 75, 5), ([1, 130], 130, 2)]
)
def test_make_gpu_ends_with_the_worst_status(tmp_path: Path, statuses: list[int], worst: int, count: int) -> None:
    """The last one that was not 0 won: a failure was hidden by a stage that was not done."""
    (tmp_path / "statuses").write_text("".join(f"{status}\n" for status in statuses))
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ncd {tmp_path}; echo >>calls; exit $(sed -n "$(wc -l <calls)p" statuses)\n')
    python.chmod(0o755)
    made = subprocess.run(["make", "gpu", f"PYTHON={python}"], cwd=ROOT, capture_output=True, text=True)
    assert made.stderr.strip().endswith(f"Error {worst}") and len((tmp_path / "calls").read_text()) == count
