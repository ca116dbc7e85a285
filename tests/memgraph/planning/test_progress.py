"""Progress of planning is shown on a terminal and in the log, and not if planning is short."""

from __future__ import annotations

import logging
import math
import os
import pty
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import memgraph
from memgraph.planning import progress
from memgraph.planning.progress import Progress
from passes import Machine, make_plan
from tests.passes.test_pipeline import FLOOR, STEP

ROOT = Path(__file__).parents[3]
SCRIPT = """
import logging, time
from memgraph.planning import progress
logging.basicConfig(level=logging.INFO, format="logged %(message)s")
progress.FIRST_S, progress.NEXT_S = 0.01, 60.0
with progress.Progress() as told:
    told.phase("pricing [ops]", 340)
    told.done()
    time.sleep(0.5)
"""


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "FIRST_S", 0.0)
    monkeypatch.setattr(progress, "NEXT_S", 0.01)


def test_advice_comes_once_and_only_where_planning_takes_long(
    soon: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    for least, times in ((3600.0, 0), (0.0, 1)):
        monkeypatch.setattr(progress, "ADVICE_S", least)
        caplog.clear()
        with Progress() as told:
            told.phase("pricing ops", 40)
            while len(caplog.messages) < 4:
                time.sleep(0.01)
        assert caplog.messages.count(progress.ADVICE) == times


def test_a_line_says_phase_count_and_what_is_left() -> None:
    told = Progress()
    told.phase("pricing ops", 40)
    told.done()
    line = told.line()
    assert line.startswith("pricing ops, 1 of 40, at most about ") and "s left (0 s so far)" in line
    assert line.endswith("s left (0 s so far)")
    told.bound(time.monotonic() + 30.5)
    assert ", 30 s of time_limit left" in told.line()
    told.bound(time.monotonic() - 1)
    assert "past time_limit: ending with what is needed" in told.line() and "left" not in told.line()
    told.bound(math.inf)
    told.phase("capturing, ops traced")
    assert told.line().startswith("capturing, ops traced (0 s so far)")
    told.done()
    assert told.line().startswith("capturing, ops traced, 1 (0 s so far)")


def test_a_line_of_planning_says_how_good_the_best_plan_is_so_far() -> None:
    best = make_plan(STEP, Machine(FLOOR))
    told = Progress()
    told.phase("planning, passes tried", 9)
    told.tried(best, best.forecast.peak - 1)
    assert told.line().startswith("planning, passes tried, 1 of 9, none fits yet, at most about ")
    told.tried(best, best.forecast.peak)
    found = f"best {best.overhead:+.1%}, within {best.gap:.1%} of the bound"
    assert told.line().startswith(f"planning, passes tried, 2 of 9, {found}, at most about ")
    told.phase("rewriting")
    assert told.line().startswith("rewriting (0 s so far)")


def test_planning_is_told_phase_by_phase_in_the_log(
    soon: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "log_progress", lambda line: progress.LOG.info(line))
    phases: list[str] = []
    phase = Progress.phase

    def noted(told: Progress, name: str, of: int = 0) -> None:
        phases.append(name)
        phase(told, name, of)

    monkeypatch.setattr(Progress, "phase", noted)
    monkeypatch.setattr(progress, "ADVICE_S", 0.0)
    with caplog.at_level(logging.INFO, logger="memgraph"):
        memgraph.plan(nn.Sequential(nn.Linear(4, 4), nn.GELU()), torch.ones(2, 4), budget="1GB")
    assert phases[:3] == ["capturing forward and backward, ops traced", "pricing ops", "planning, passes tried"]
    assert any("time_limit=" in record.getMessage() for record in caplog.records)


def test_capture_tells_how_many_ops_it_has_traced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Layer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            print(told[0].line())
            return x.sin().cos()

    told: list[Progress] = []
    enter = Progress.__enter__

    def noted(progress: Progress) -> Progress:
        told.append(progress)
        return enter(progress)

    monkeypatch.setattr(Progress, "__enter__", noted)
    memgraph.plan(nn.Sequential(Layer(), nn.Linear(4, 4), Layer()), torch.ones(2, 4), budget="1GB")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("capturing")]
    assert lines[0].startswith("capturing forward and backward, ops traced (")
    begin, _, rest = lines[-1].partition("ops traced, ")
    assert begin == "capturing forward and backward, "
    assert int(rest.partition(" ")[0]) >= 4  # sine, cosine, a transposed weight and its product


def test_a_quick_plan_says_nothing_and_leaves_no_thread(caplog: pytest.LogCaptureFixture) -> None:
    before = threading.active_count()
    with caplog.at_level(logging.INFO, logger="memgraph"), Progress() as told:
        told.phase("planning")
    assert threading.active_count() == before
    assert caplog.records == []


def test_what_fails_while_it_is_told_harms_nothing(soon: None, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = threading.Event()

    def broken(line: str) -> None:
        tried.set()
        raise OSError("the terminal is gone")

    monkeypatch.setattr(progress, "log_progress", broken)
    with Progress():
        assert tried.wait(10)
    monkeypatch.setattr(threading.Thread, "start", lambda thread: (_ for _ in ()).throw(RuntimeError("no threads")))
    with Progress():
        pass


@pytest.mark.long
def test_it_is_printed_on_a_terminal() -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm"}
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stderr=theirs, cwd=ROOT, env=environment) as process:
        os.close(theirs)
        text = b""
        while True:
            try:
                text += (part := os.read(ours, 4096))
            except OSError:  # its end
                break
            if not part:
                break
    os.close(ours)
    assert process.returncode == 0
    assert b"memgraph: pricing [ops], 1 of 340, at most about" in text
    assert b"logged" not in text


@pytest.mark.long
def test_it_is_logged_elsewhere() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert run.returncode == 0
    assert run.stderr.startswith("logged pricing [ops], 1 of 340") and run.stdout == ""
