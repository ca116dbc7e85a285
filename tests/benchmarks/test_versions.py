"""The table of torch versions: what is counted, and that nothing waits longer than it may."""

from __future__ import annotations

import os
import re
import sys
import time
import tomllib
from pathlib import Path

import pytest

from benchmarks import versions
from benchmarks.versions import NotTestedError, installed, interpreter
from memgraph.system.private_names import TESTED

TESTS = """
import pytest
def test_right(): pass
def test_wrong(): assert False
@pytest.mark.parametrize("x", [1, 2])
def test_known(x): pytest.xfail("it does not work yet")
@pytest.mark.xfail(strict=True)
def test_works_by_now(): pass
"""


def test_the_versions_are_those_that_memgraph_says_it_works_with() -> None:
    assert versions.VERSIONS == TESTED


@pytest.mark.long
def test_a_row_counts_what_passed_failed_and_is_known_to_fail(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    row = versions.tested(Path(sys.executable), [str(tmp_path / "test_some.py")], time.monotonic() + 300)
    assert (row.passed, row.failed, row.xfailed, row.left) == (1, 2, 2, 0)
    assert str(row).split()[:3] == [row.python, row.torch, row.triton]
    assert len(str(row).split()) == len(versions.HEADER.split())


@pytest.mark.long
def test_a_crash_is_a_failure_and_tests_that_had_no_time_are_no_results(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text("import os\ndef test_crashes(): os.abort()")
    given = Path(sys.executable), [str(tmp_path / "test_some.py")]
    assert versions.tested(*given, time.monotonic() + 300).failed == 1
    with pytest.raises(NotTestedError, match="of 1 tests none has begun in 0 seconds"):
        versions.tested(*given, time.monotonic() + versions.ENDING)


def test_what_does_not_end_in_its_time_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    child = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    script = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with pytest.raises(NotTestedError, match="has not ended in its time"):
        versions._run([sys.executable, "-c", script], time.monotonic() + 2)
    pid = int((tmp_path / "pid").read_text())
    while os.path.exists(f"/proc/{pid}") and "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:3]:
        time.sleep(0.01)


def test_what_can_not_be_installed_is_said_and_may_be_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(versions, "FOLDER", tmp_path)
    monkeypatch.setattr(versions, "ROOM", 1 << 60)
    with pytest.raises(NotTestedError, match="GB of disk"):
        installed(Path(sys.executable), "2.15", tmp_path, time.monotonic() + 60)
    monkeypatch.setattr(sys, "argv", ["versions", "newest", "--optional"])
    assert versions.main() == 0
    assert f"torch newest ON PYTHON {versions.OWN} WAS NOT TESTED: it takes up to" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["versions", "2.15"])
    assert versions.main() == 1


def test_a_python_is_found_on_path_or_among_those_of_pyenv_and_one_that_is_not_there_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def made(path: str, text: str) -> Path:
        place = tmp_path / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(f"#!/bin/sh\n{text}\n")
        place.chmod(0o755)
        return place

    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    monkeypatch.setattr(versions, "PYTHONS", ("3.7", "3.8", versions.OWN))
    assert interpreter(versions.OWN) == Path(sys.executable)
    monkeypatch.setattr(sys, "argv", ["versions", "3.7/2.14", "--optional"])
    assert versions.main() == 0
    said = "torch 2.14 ON PYTHON 3.7 WAS NOT TESTED: there is no Python 3.7 with ensurepip on PATH or in "
    assert said in capsys.readouterr().out
    with pytest.raises(NotTestedError, match=r"no Python 3\.8 or 3\.7 "):
        interpreter("other")
    made("bin/python3.8", "exit 127")  # as one of pyenv's that is off
    made("versions/3.8.9/bin/python", "echo 3.8")
    newest = made("versions/3.8.18/bin/python", "echo 3.8")
    assert interpreter("other") == interpreter("3.8") == newest
    on_path = made("bin/python3.8", "echo 3.8")
    assert interpreter("3.8") == on_path


def test_the_pythons_are_those_of_the_classifiers() -> None:
    said = tomllib.loads((versions.ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    assert tuple(re.findall(r"Python :: (3\.\d+)\b", "\n".join(said))) == versions.PYTHONS


def test_a_registry_that_does_not_answer_is_said_once_beside_what_pip_makes_of_it() -> None:
    retries = [f"WARNING: Retrying (total={i}) after connection broken by 'Connection refused'" for i in (4, 3)]
    printed = "\n".join([*retries, "ERROR: No matching distribution found for numpy"])
    with pytest.raises(NotTestedError) as error:
        versions._run([sys.executable, "-c", f"print({printed!r}); raise SystemExit(1)"], time.monotonic() + 60)
    assert str(error.value).endswith(f"has failed: {retries[0]} | ERROR: No matching distribution found for numpy")
