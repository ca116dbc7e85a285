"""The command line, run as its users run it: in a process of its own, with its exit codes, on a real factory."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import networkx as nx
import pytest
import torch

import memgraph
from memgraph.command import planning
from memgraph.command.app import main
from memgraph.command.factory import load_call
from memgraph.fit.described_model import ModelCall
from passes import NO_PROOFS

FACTORY = """
import torch
from torch import nn

def setup():
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)])
    return {"model": model, "args": (torch.randn(128, 64),), "optimizer": torch.optim.AdamW(model.parameters())}

def pair():
    return nn.Linear(8, 8), torch.randn(4, 8)

def alone():
    return nn.Linear(8, 8)

def nothing():
    return 3

def misspelt():
    return {"model": nn.Linear(8, 8), "arguments": ()}

def broken():
    raise ValueError("no data today")

def exits():
    raise SystemExit(0)

def prints():
    import os, subprocess, sys
    print("from Python")
    os.write(1, b"from the process\\n")
    subprocess.run([sys.executable, "-c", "print('from a child')"], check=True)
    return pair()
"""


@pytest.fixture
def target(tmp_path: Path) -> str:
    (tmp_path / "factory_of_test.py").write_text(FACTORY)
    return f"{tmp_path}/factory_of_test.py"


@pytest.fixture
def plans(target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[Path, Path]:
    """Files of two plans of one step."""
    assert main(["explain", f"{target}:setup", "--json"]) == 0
    peak = json.loads(capsys.readouterr().out)["peak"]
    files = tmp_path / "a.json", tmp_path / "b.json"
    for file, share in zip(files, (0.9, 0.75), strict=True):
        budget = str(int(share * peak))
        assert main(["plan", f"{target}:setup", "--budget", budget, "-o", str(file), "--time-limit", "5"]) == 0
    capsys.readouterr()
    return files


@pytest.mark.long
def test_a_process_prints_the_report_alone_on_stdout(target: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "memgraph", "plan", f"{target}:setup", "--budget", "1GB", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "NO_COLOR": "1"})
    assert done.returncode == 0
    assert memgraph.Report.from_json(done.stdout).budget == 10**9
    assert "capturing" in done.stderr and "{" not in done.stderr


@pytest.mark.parametrize("words", ["doctor", "show nowhere.json", "verify nowhere.json", "show --help"])
def test_torch_is_imported_behind_the_first_line_and_not_to_read_text(words: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    done = subprocess.run(
        [sys.executable, "-m", "memgraph", *words.split()], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    needs_torch = words == "doctor"
    assert done.stderr.startswith("memgraph: loading torch\n") is needs_torch
    assert ("no torch here" in done.stderr) is needs_torch
    assert ("nowhere.json" in done.stderr) is words.endswith("nowhere.json")


@pytest.mark.long
def test_what_the_factory_prints_is_no_data(target: str) -> None:
    command = [sys.executable, "-m", "memgraph", "plan", f"{target}:prints", "--budget", "1GB", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert memgraph.Report.from_json(done.stdout).budget == 10**9
    assert all(f"from {each}" in done.stderr for each in ("Python", "the process", "a child"))


def test_without_a_budget_a_plan_may_use_what_is_free(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"{target}:setup", "--json"]) == 0
    assert memgraph.Report.from_json(capsys.readouterr().out).budget > 100e6
    assert main(["plan", f"{target}:setup", "--budget", "None"]) == 2
    assert "--budget='None' can't be read" in capsys.readouterr().err


def test_a_budget_that_no_plan_fits_is_exit_code_3(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"{target}:setup", "--budget", "100KB"]) == 3
    assert "the smallest budget for which a plan was found is" in capsys.readouterr().err


@pytest.mark.long
def test_a_plan_is_written_shown_and_compared(
    plans: tuple[Path, Path], target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = map(str, plans)
    assert main(["show", one]) == 0
    assert capsys.readouterr().out.startswith("fits: forecast")
    assert main(["show", one, "--json"]) == 0
    assert capsys.readouterr().out == plans[0].read_text() + "\n"
    assert main(["diff", one, other, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["same_step"] and found["changes"]
    assert found["peaks"] == [memgraph.SavedPlan.from_json(file.read_text()).peak for file in plans]
    model, *_ = _setup(target)
    assert memgraph.compile(model, "1GB", plan=one)  # the file that it writes is one that compile takes


@pytest.mark.long
def test_a_plan_file_is_verified_without_a_solver(
    plans: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("passes.lp.solver.highspy", None)
    for file in plans:
        code = main(["verify", str(file), "--json"])
        found = json.loads(capsys.readouterr().out)
        assert code == int(not found["holds"])
        assert found["peak"] == memgraph.SavedPlan.from_json(file.read_text()).peak <= found["budget"]


@pytest.mark.long
def test_a_file_that_claims_too_much_is_not_verified(
    plans: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = memgraph.SavedPlan.from_json(plans[1].read_text())
    boast = replace(saved, bound_us=saved.bound_us + 1e6, any_us=saved.any_us + 1e6)
    (file := tmp_path / "boast.json").write_text(boast.to_json())
    assert main(["verify", str(file)]) == 1
    file.write_text(replace(boast, proofs=NO_PROOFS).to_json())
    capsys.readouterr()
    assert main(["verify", str(file)]) == 1
    said = capsys.readouterr().out
    assert "proven without a solver" in said and "which leaves no dual values to check" in said
    over = replace(saved, machine=replace(saved.machine, budget=saved.peak - 1))
    file.write_text(over.to_json())
    capsys.readouterr()
    assert main(["verify", str(file)]) == 3
    assert capsys.readouterr().out.startswith("does not fit")


def test_a_timeline_and_a_graph_are_written(target: str, tmp_path: Path) -> None:
    trace, graph = tmp_path / "t.json", tmp_path / "g.graphml"
    assert main(["plan", f"{target}:setup", "--budget", "1GB", "--trace", str(trace), "--graphml", str(graph)]) == 0
    assert json.loads(trace.read_text())["traceEvents"]
    assert "return" in nx.read_graphml(graph)


@pytest.mark.long
def test_a_sweep_is_printed_and_given_as_json(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["sweep", f"{target}:setup", "--budget", "1GB", "--budget", "0.5", "--budget", "100KB", "--json"]
    assert main([*given, "--time-limit", "1"]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    assert [point["us"] is not None for point in points] == [True, True, False]


def test_a_sweep_in_which_nothing_fits_is_exit_code_3(target: str) -> None:
    assert main(["sweep", f"{target}:setup", "--budget", "100KB", "--time-limit", "0"]) == 3


def test_the_peak_is_explained_with_the_step_as_it_is(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{target}:setup", "--json"]) == 0
    found = memgraph.Report.from_json(capsys.readouterr().out)
    model, x, optimizer = _setup(target)
    assert found.peak == memgraph.plan(model, x, budget="1GB", optimizer=optimizer).peak == found.budget
    assert found.plan == ()


def test_a_step_that_is_explained_has_no_budget(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{target}:setup"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("as it is, the step takes ") and "at the peak" in printed
    assert "budget" not in printed and "decided" not in printed


def test_a_warning_is_a_line_without_the_code_of_a_library(
    target: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:

    def warning(name: str) -> ModelCall:
        warnings.warn("give budget=5 for both", RuntimeWarning, stacklevel=1)
        return load_call(name)

    monkeypatch.setattr(planning, "load_call", warning)
    assert main(["plan", f"{target}:setup", "--budget", "1GB"]) == 0
    assert "memgraph: warning: give budget=5 for both\n" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["nan", "-1"])
def test_a_time_limit_that_is_none_is_wrong_usage(
    seconds: str, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", f"{target}:setup", "--budget", "1MB", "--time-limit", seconds]) == 2
    assert "0 for the quickest plan" in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_factories_may_return_a_module_with_arguments(target: str) -> None:
    assert main(["plan", f"{target}:pair", "--budget", "1MB"]) == 0


@pytest.mark.long
def test_output_that_nobody_reads_ends_quietly(plans: tuple[Path, Path], tmp_path: Path) -> None:
    page = str(tmp_path / "page.html")
    command = [
        sys.executable,
        "-m",
        "memgraph",
        "show",
        str(plans[0]),
        "--html",
        page,
        "--beside",
        str(plans[1]),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    said = process.stderr.read()
    assert process.wait(300) == 1
    assert "ended the process" not in said and "Traceback" not in said and "Exception ignored" not in said


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "Usage"),
        (["plan"], "Missing argument"),
        (["plan", "nowhere", "--budget", "1GB"], "names no factory"),
        (["plan", "nowhere.py:setup", "--budget", "1GB"], "there is no file 'nowhere.py'"),
        (["plan", "no_such_module:setup", "--budget", "1GB"], "there is no module 'no_such_module'"),
        (["plan", "{}:absent", "--budget", "1GB"], "has no function 'absent'"),
        (["plan", "{}:nothing", "--budget", "1GB"], "returned int, which has no module"),
        (["plan", "{}:misspelt", "--budget", "1GB"], "returned unknown arguments"),
        (["plan", "{}:setup", "--budget", "1GB", "--offlaod", "disk"], "No such option"),
        (["plan", "{}:setup", "--budget", "8 gigs"], "can't be read"),
        (["plan", "{}:setup", "--budget", "0"], "not positive"),
        (["plan", "{}:setup", "--budget", "1GB", "--offload", "tape"], "tape"),
        (["show", "{}", "--beside", "{}"], "--beside is for the page"),
        (["plan", "{}:setup", "--budget", "1GB", "-o", "no/such/folder/plan.json"], "there is no folder"),
        (["plan", "{}:setup", "--budget", "1GB", "--html", "."], "is a folder"),
        (["show", "nowhere.json"], "there is no file 'nowhere.json'"),
        (["show", "."], "'.' is a directory, and a plan is a file"),
        (["fit", "llama", "--device", "h200", "--step", "5"], "--step is the step of --max"),
        (["fit", "nowhere.json", "--device", "h200"], "there is no file or folder 'nowhere.json'"),
        (["diff", "nowhere.json"], "Missing argument"),
    ],
)
def test_wrong_usage_is_exit_code_2(
    given: list[str], said: str, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([each.format(target) for each in given]) == 2
    written = capsys.readouterr()
    assert said in written.err + written.out


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["plan", "{}:exits", "--budget", "1GB"], "ended the process, with exit code 0"),
        (["plan", "{}:broken", "--budget", "1GB"], "no data today ("),
        (["plan", "{}:alone", "--budget", "1GB"], "missing 1 required positional argument"),
        (["show", "{}"], "factory_of_test.py: the saved plan is not JSON"),
        (["diff", "{}", "{}"], "factory_of_test.py: the saved plan is not JSON"),
        (["verify", "{}"], "factory_of_test.py: the saved plan is not JSON"),
    ],
)
def test_an_error_is_exit_code_1_and_one_line(
    given: list[str], said: str, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([each.format(target) for each in given]) == 1
    assert said in capsys.readouterr().err


def test_an_interrupt_is_exit_code_130(
    target: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("memgraph.command.planning.plan_call", interrupted)
    assert main(["plan", f"{target}:setup", "--budget", "1GB"]) == 130
    assert capsys.readouterr().err.endswith("memgraph: interrupted\n")


def test_the_doctor_looks_at_disk_memory_and_versions(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["doctor", "--json", "--spill-dir", str(tmp_path)]) == 0
    found = {each["what"]: each for each in json.loads(capsys.readouterr().out)}
    assert {"system", "torch", "highspy", "cores", "memory", "allocator", "GPU", "disk", "cache"} <= found.keys()
    assert all(each["advice"] for each in found.values() if each["verdict"] != "ok")
    assert str(tmp_path) in found["disk"]["found"]


@pytest.mark.long
def test_the_demo_trains_to_equal_losses_under_a_budget(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    assert main(["demo", "--steps", "2", "-o", str(file)]) == 0
    assert "equal to the bit" in capsys.readouterr().out
    report = memgraph.Report.from_json(file.read_text())
    assert report.measured is not None
    assert report.measured <= report.peak <= report.budget


def _setup(target: str) -> tuple[torch.nn.Module, torch.Tensor, torch.optim.Optimizer]:
    call = load_call(f"{target}:setup")
    assert call.optimizer is not None
    return call.model, call.args[0], call.optimizer


def test_help_has_examples_and_all_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert "Usage: memgraph" in text and "memgraph plan train.py:setup" in text and "130 interrupted" in text


def test_a_choice_of_a_plan_is_explained(
    target: str, plans: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    report = memgraph.Report.from_json(plans[1].read_text())
    value, kind = next((each.value, type(each).__name__.lower()) for each in report.plan)
    assert main(["explain", str(plans[1]), value, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["value"] == value and found["us"] == report.predicted_us
    assert [each["kind"] for each in found["choices"] if each["taken"]] == ["offload" if kind == "stream" else kind]
    assert main(["explain", str(plans[1]), value, "--choice", "keep"]) == 0
    printed = capsys.readouterr().out
    assert "chosen; this plan takes" in printed and printed.count("keep") == 1


@pytest.mark.long
@pytest.mark.parametrize(
    "words, said",
    [
        (["PLAN"], "name a value of the plan"),
        (["PLAN", "nothing"], "no value 'nothing'"),
        (["PLAN", "tangent_0"], "stays on the device"),
        (["PLAN", "0", "--choice", "swap"], "no choice 'swap'"),
        (["TARGET", "0"], "give the file of `memgraph plan -o`"),
        (["none.json", "0"], "no file 'none.json'"),
    ],
)
def test_what_can_t_be_explained_is_said(
    words: list[str], said: str, target: str, plans: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"PLAN": str(plans[1]), "TARGET": f"{target}:setup"}
    assert main(["explain", *(places.get(word, word) for word in words)]) == 2
    assert said in " ".join(capsys.readouterr().err.replace("│", "").split())


def test_versions_are_printed_without_a_wait(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    told = capfd.readouterr()
    assert (
        told.out == f"memgraph {memgraph.__version__}, torch {torch.__version__}, Python {platform.python_version()}\n"
    )
    assert told.err == ""
