"""The smoke of a GPU: each case has a process and a time of its own, and a line whatever becomes of it."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import smoke, smoke_cases
from benchmarks.last_words import last_words
from benchmarks.smoke_cases import Norms, WrongError, norms

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
ABOUT = "A GPU", "2.0", "3.0"
FATES = """
import os, signal, sys, time
if sys.argv[1] == "crash": os.kill(os.getpid(), signal.SIGSEGV)
if sys.argv[1] == "hang": time.sleep(600)
if sys.argv[1] == "wrong":
    print("a warning of ours", file=sys.stderr)
    raise ValueError("the bits differ\\nSearch for `wrong' in a manual")
print("noise"); print("3 MB of 4")
"""


def test_every_case_is_there() -> None:
    assert all(callable(getattr(smoke_cases, case)) and getattr(smoke_cases, case).__doc__ for case in smoke.CASES)


def test_on_a_cpu_no_case_is_asked_for_what_it_has_not() -> None:
    assert {*smoke._cases("A GPU")} - {*smoke._cases("cpu")} == {"recording"}


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_cuda_device_it_says_so_in_a_line() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "benchmarks.smoke"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert found.returncode == 1 and found.stdout == ""
    assert found.stderr.startswith("the smoke wants a CUDA device, and the torch of ") and found.stderr.count("\n") == 1


@pytest.mark.long
def test_a_crash_and_a_hang_are_lines_and_take_no_other_case_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "fates.py"
    script.write_text(FATES)
    monkeypatch.setattr(smoke, "COMMAND", (sys.executable, str(script)))
    monkeypatch.setattr(smoke, "LOGS", tmp_path / "logs")
    begin = time.monotonic()
    lines = {line.case: line for line in smoke.run(["crash", "hang", "wrong", "right"], ABOUT, 5.0, tmp_path)}
    assert time.monotonic() - begin < 300  # not the ten minutes that one wants
    assert {case: (line.ok, line.found) for case, line in lines.items()} == {
        "crash": (False, "ended by SIGSEGV"),
        "hang": (False, "has not ended in its time"),
        "wrong": (False, f"ValueError: the bits differ; {tmp_path / 'logs' / 'smoke-wrong.txt'} has its stderr"),
        "right": (True, "3 MB of 4"),
    }
    whole = (tmp_path / "logs" / "smoke-wrong.txt").read_text()
    assert whole.startswith("a warning of ours\nTraceback") and whole.endswith("Search for `wrong' in a manual\n")
    (file,) = (tmp_path / "a-gpu").iterdir()
    written = [json.loads(line) for line in file.read_text().splitlines()]
    shown = capsys.readouterr().out.splitlines()
    assert [one["case"] for one in written] == [line.split()[1] for line in shown] and len(written) == 4
    assert all((one["device"], one["torch"], one["triton"]) == ABOUT for one in written)


FAULT = """a warning
Traceback (most recent call last):
  File "a.py", line 3, in <module>
    step()
    ~~~~^^
torch.AcceleratorError: CUDA error: operation not supported
Search for `cudaErrorNotSupported' in https://docs.nvidia.com/cuda for more information.
CUDA kernel errors might be asynchronously reported at some other API call.

Exception ignored in: <function Pool.__del__ at 0x7f>
Traceback (most recent call last):
  File "b.py", line 5, in __del__
AttributeError: 'NoneType' object has no attribute 'free'
"""


@pytest.mark.parametrize(
    "text, words",
    [
        (FAULT, "torch.AcceleratorError: CUDA error: operation not supported"),
        (
            'Traceback (most recent call last):\n  File "a.py", line 3\nKeyError: 1\n\nDuring handling, another exception'
            ' occurred:\n\nTraceback (most recent call last):\n  File "a.py", line 5\ntorch.Failed: inductor raised:\nValueError: no\n\nadvice\n',
            "torch.Failed: inductor raised: ValueError: no",
        ),
        (
            "terminate called after throwing 'c10::Error'\n  what():  CUDA error: unknown\nFatal Python error: Aborted\n\nThread 0x1\n",
            "CUDA error: unknown",
        ),
        (
            "Fatal Python error: Segmentation fault\n\nExtension modules: numpy\n",
            "Fatal Python error: Segmentation fault",
        ),
        ("only\nthis\n", "this"),
        ("", ""),
    ],
)
def test_a_process_is_said_to_have_failed_by_its_exception(text: str, words: str) -> None:
    """The last line of an error of CUDA is the same for many, and says nothing."""
    assert last_words(text) == words


def test_a_smoke_that_is_stopped_takes_its_cases_with_it(tmp_path: Path) -> None:
    """They are in groups of their own, and ran on for as long as they hung."""
    script = tmp_path / "sleeps.py"
    script.write_text(
        f"import os, time; open({str(tmp_path / 'sleepers')!r}, 'a').write(f'{{os.getpid()}} '); time.sleep(60)"
    )
    program = f"""
import sys
from pathlib import Path
from benchmarks import smoke
smoke.COMMAND, smoke.LOGS = (sys.executable, {str(script)!r}), Path({str(tmp_path / "logs")!r})
smoke.device_or_reason = lambda *_: {ABOUT!r}
sys.exit(smoke.main())
"""
    command = [sys.executable, "-c", program, "--into", str(tmp_path), "--seconds", "600"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    until, sleepers = time.monotonic() + 300, tmp_path / "sleepers"
    while not (sleepers.is_file() and len(sleepers.read_text().split()) == smoke.AT_ONCE) and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.communicate()[1] == "the smoke was stopped, and its cases with it\n" and process.returncode == 130
    for sleeper in map(int, sleepers.read_text().split()):
        with pytest.raises(ProcessLookupError):
            os.kill(sleeper, 0)


def test_a_described_device_has_no_lines_among_those_of_a_real_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMGRAPH_DESCRIBED", "h200")
    monkeypatch.setenv("LD_PRELOAD", "")
    for module in ("stages", "smoke"):
        command = [sys.executable, "-m", f"benchmarks.{module}", *(["smoke"] if module == "stages" else [])]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 1 and "this one is described" in done.stderr and done.stderr.count("\n") == 1


def test_benchmarks_want_no_pytest() -> None:
    """`pip install .` has none, and each case of the smoke takes something from tests/support."""
    seen: dict[str, list[str]] = {}
    files = [*(ROOT / "benchmarks").rglob("*.py")]
    while files:
        file = files.pop()
        name = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        if name not in seen:
            seen[name] = [*_imported(file)]
            paths = (ROOT.joinpath(*module.split(".")).with_suffix(".py") for module in seen[name])
            files += [path for path in paths if path.is_file() and path.is_relative_to(ROOT / "tests")]
    assert "tests.support.forced_plans" in seen
    assert [name for name, modules in seen.items() if {"pytest", "hypothesis"} & set(modules)] == []


def _imported(file: Path) -> Iterator[str]:
    """Yield the modules that a file imports when it is imported itself."""
    for node in _run_at_import(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        if isinstance(node, ast.ImportFrom):
            package = ".".join(file.relative_to(ROOT).parts[: -node.level]) + "." if node.level else ""
            module = (package + (node.module or "")).rstrip(".")
            yield module
            yield from (f"{module}.{name.name}" for name in node.names)


def _run_at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes outside of functions, and of what only types are for."""
    for node in ast.iter_child_nodes(tree):
        for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if not for_types and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
            yield from _run_at_import(node)


@pytest.mark.long
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
