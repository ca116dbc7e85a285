"""The table of torch versions: what is counted, and that nothing waits longer than it may."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from benchmarks import versions
from benchmarks.versions import NotInstalledError, installed
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


def test_a_row_counts_what_passed_failed_and_is_known_to_fail(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    row = versions.tested(Path(sys.executable), [str(tmp_path / "test_some.py")], time.monotonic() + 300)
    assert (row.passed, row.failed, row.xfailed) == (1, 2, 2)
    assert str(row).split()[:2] == [row.torch, row.triton] and len(str(row).split()) == 6


def test_what_does_not_end_in_its_time_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    child = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    script = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with pytest.raises(NotInstalledError, match="has not ended in its time"):
        versions._run([sys.executable, "-c", script], time.monotonic() + 2)
    pid = int((tmp_path / "pid").read_text())
    while os.path.exists(f"/proc/{pid}") and "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:3]:
        time.sleep(0.01)


def test_what_can_not_be_installed_is_said_and_fails_no_smoke(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(versions, "FOLDER", tmp_path)
    monkeypatch.setattr(versions, "ROOM", 1 << 60)
    with pytest.raises(NotInstalledError, match="GB of disk"):
        installed("2.15", time.monotonic() + 60)
    monkeypatch.setattr(sys, "argv", ["versions", "newest", "--smoke"])
    assert versions.main() == 0
    assert "torch newest WAS NOT TESTED: it takes up to" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["versions", "2.15"])
    assert versions.main() == 1


def test_a_registry_that_does_not_answer_is_said_once_beside_what_pip_makes_of_it() -> None:
    retries = [f"WARNING: Retrying (total={i}) after connection broken by 'Connection refused'" for i in (4, 3)]
    printed = "\n".join([*retries, "ERROR: No matching distribution found for numpy"])
    with pytest.raises(NotInstalledError) as error:
        versions._run([sys.executable, "-c", f"print({printed!r}); raise SystemExit(1)"], time.monotonic() + 60)
    assert str(error.value).endswith(f"has failed: {retries[0]} | ERROR: No matching distribution found for numpy")
