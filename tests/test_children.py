"""Tests end in their time, and what they start ends with them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.forks import RAISED, RIGHT, WRONG, forked

ROOT = Path(__file__).parents[1]
FORKING = re.compile(
    r"\bos\.(fork|forkpty|posix_spawn)|\bpty\.fork|\bimport fork\b|\bmultiprocessing\b(?!\.reductions)|ProcessPool"
)
MAY_FORK = {"tests/test_children.py", "tests/support/forks.py", "tests/support/ranks.py"}  # which bound their children
HANG = """
import ctypes, subprocess, time
import pytest

@pytest.fixture
def tidies():
    yield
    time.sleep(600)

def test_python(): time.sleep(600)
def test_tidying(tidies): time.sleep(600)
def test_c():
    open({pid!r}, "w").write(str(subprocess.Popen(["sleep", "600"]).pid))
    mutex = ctypes.create_string_buffer(256)
    ctypes.PyDLL(None).pthread_mutex_lock(mutex)
    ctypes.PyDLL(None).pthread_mutex_lock(mutex)  # with the lock of the interpreter, too

def test_right(): pass
"""


def no() -> bool:
    return False


def fails() -> None:
    pytest.fail("of the child")


def leaves() -> None:
    raise SystemExit(0)


@pytest.mark.parametrize(("work", "code"), [(int, RIGHT), (no, WRONG), (fails, RAISED), (leaves, RAISED)])
def test_a_child_never_goes_on_with_the_tests_of_its_parent(
    work: Callable[[], object], code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    assert forked(work).code() == code
    assert ("of the child" in capfd.readouterr().err) == (work is fails)


def test_a_child_ends_when_its_time_is_over_with_all_that_it_has_started(tmp_path: Path) -> None:
    def work() -> None:
        (tmp_path / "pid").write_text(str(subprocess.Popen(["sleep", "600"]).pid))
        time.sleep(600)

    def stops() -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    for each in (work, stops):
        with pytest.raises(AssertionError, match="has not ended in its time"):
            forked(each, 0.5).code()
    assert_ended(int((tmp_path / "pid").read_text()))


def test_a_child_ends_with_its_parent() -> None:
    ours, theirs = os.pipe()

    def parent() -> None:
        child = forked(lambda: time.sleep(600))
        os.write(theirs, str(child.process).encode())

    assert forked(parent).code() == RIGHT
    assert_ended(int(os.read(ours, 100)))
    os.close(ours)
    os.close(theirs)


@pytest.mark.long
def test_a_hanging_test_ends_in_its_time_and_what_it_has_started_with_the_run(tmp_path: Path) -> None:
    printed = ended_run(tmp_path, "1")
    for said in ("FAILED test_hang.py::test_python", "FAILED test_hang.py::test_c", "4 failed, 1 passed"):
        assert said in printed
    assert "crashed while running 'test_hang.py::test_tidying'" in printed
    assert "crashed while running 'test_hang.py::test_c'" in printed
    assert_ended(int((tmp_path / "pid").read_text()))


@pytest.mark.long
def test_without_workers_a_call_that_hangs_in_c_ends_the_run(tmp_path: Path) -> None:
    printed = ended_run(tmp_path, "0", "-k", "test_c")
    assert "Timeout (0:00:01)!" in printed and "in test_c\n" in printed
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


def ended_run(folder: Path, workers: str, *options: str) -> str:
    """Run tests that hang, with this plugin and the project's settings, and return what is printed."""
    (folder / "test_hang.py").write_text(HANG.format(pid=str(folder / "pid")))
    given = ["-c", str(ROOT / "pyproject.toml"), "-p", "tests.support.time_limits", "-p", "no:cacheprovider"]
    limits = ["--timeout", "0.5", "--grace", "0.5", "--rootdir", str(folder), "-n", workers, *options, "test_hang.py"]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *given, *limits], cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert ran.returncode == 1
    return ran.stdout


def test_no_test_forks_in_another_way() -> None:
    files = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "tests").rglob("*.py")}
    assert {name for name, text in files.items() if FORKING.search(text)} <= MAY_FORK


def assert_ended(process: int) -> None:
    """Fail unless a process ends in a while."""
    for _ in range(1000):
        stat = Path(f"/proc/{process}/stat")
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.01)
    os.kill(process, signal.SIGKILL)
    raise AssertionError("it is still there")
