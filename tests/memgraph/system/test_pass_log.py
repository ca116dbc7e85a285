"""The log shows what each pass did, if it is asked for."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

import memgraph
from passes import PASSES, parse, predict
from tests.support.models import batch, net

SCRIPT = """
import memgraph
from tests.support.models import batch, net
peak = memgraph.plan(net(), batch(), budget="1GB").peak
memgraph.plan(net(), batch(), budget=peak - 50_000, time_limit=0)
"""
NAMES = {each.name for each in PASSES}


def test_each_pass_writes_the_step_that_it_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peak = memgraph.plan(net(), batch(), budget="1GB").peak
    monkeypatch.setenv("MEMGRAPH_DUMP", str(tmp_path))
    monkeypatch.setattr("memgraph.planning.search.cached_plan", lambda *_: None)
    report = memgraph.plan(net(), batch(), budget=peak - 50_000, offload=None)
    folders = sorted(tmp_path.iterdir())
    assert folders
    files = sorted(folders[0].iterdir())
    assert [file.name.split("-")[0] for file in files] == [f"{i:02d}" for i in range(len(files))]
    assert files[0].name == "00-captured.txt" and {file.stem[3:] for file in files[1:]} <= NAMES
    traces = [parse(file.read_text()) for file in files]
    assert traces[0] == report.choice.captured.trace
    assert predict(traces[-1], report.machine).peak == report.peak


@pytest.mark.long
@pytest.mark.parametrize(
    ("level", "shown", "hidden"),
    [("1", "", "captured  "), ("2", "captured  ", "recompute "), ("3", "recompute ", "\0")],
)
def test_a_level_shows_passes_and_decisions_on_stderr(level: str, shown: str, hidden: str, tmp_path: Path) -> None:
    asked = {**os.environ, "MEMGRAPH_DEBUG": level, "MEMGRAPH_CACHE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=asked, capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert shown in done.stderr and hidden not in done.stderr


@pytest.mark.long
def test_an_unknown_level_is_a_warning() -> None:
    script, asked = "import memgraph; memgraph.compile", {**os.environ, "MEMGRAPH_DEBUG": "verbose"}
    done = subprocess.run([sys.executable, "-c", script], env=asked, capture_output=True, text=True, check=True)
    assert "MEMGRAPH_DEBUG='verbose' means nothing" in done.stderr


def test_nothing_is_logged_unless_it_is_asked_for() -> None:
    assert not any(type(each) is logging.StreamHandler for each in logging.getLogger("memgraph").handlers)


def test_each_plan_that_runs_is_a_line_of_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "plans.jsonl"
    monkeypatch.setenv("MEMGRAPH_PLANS", str(file))
    compiled = memgraph.compile(net(), "1GB", time_limit=0)
    for rows in (4, 4, 6):
        compiled(batch()[:rows]).sum().backward()
        compiled.zero_grad()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["model"] for line in lines] == [type(net()).__name__] * 2
    assert lines[-1]["peak"] == compiled.plan.peak <= lines[-1]["budget"] == compiled.plan.budget == 10**9
    assert lines[0]["process"] == os.getpid() and lines[0]["time"] <= lines[1]["time"]
    assert {"us", "longer", "gap", "decisions", "as_it_is", "planned_us", "device"} <= lines[0].keys()


def test_a_file_for_plans_that_cant_be_written_is_said_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMGRAPH_PLANS", str(tmp_path / "nowhere" / "plans.jsonl"))
    compiled = memgraph.compile(net(), "1GB", time_limit=0)
    with pytest.warns(RuntimeWarning, match="MEMGRAPH_PLANS=.* can't be written: No such file or directory"):
        compiled(batch()).sum().backward()
