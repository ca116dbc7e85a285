"""A step that spills says which folder or which disk fails it and what to do, and works again when that is mended."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import memgraph
from tests.support.faults import ROOM, assert_next_step_right, batch, failing, fresh, living, open_files, step
from tests.support.forks import forked
from tests.support.slow_disk import SHM


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="there is no folder that takes no files of root")
def test_a_folder_that_takes_no_files_is_said_at_once() -> None:
    before = open_files()
    with pytest.raises(memgraph.SpillError, match=r"in /proc: .*name a writable folder on a disk with spill_dir="):
        fresh(spill_dir=Path("/proc"))
    assert open_files() <= before


@pytest.mark.usefixtures("spilling")
def test_a_folder_that_is_gone_since_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    _, compiled = fresh(spill_dir=tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(memgraph.SpillError, match=r"gone: it is not a folder.*spill_dir="):
        compiled(batch())


@pytest.mark.usefixtures("spilling")
def test_a_folder_that_can_not_be_written_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def denied(path: Any, *args: Any, **kwargs: Any) -> int:  # root may write anywhere
        if str(path).startswith(str(tmp_path)):
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path, *args, **kwargs)

    _, compiled = fresh(spill_dir=tmp_path)
    monkeypatch.setattr(os, "open", denied)
    before = open_files()
    text = rf"in {tmp_path}: .*Permission denied; name a writable folder on a disk with spill_dir="
    with pytest.raises(memgraph.SpillError, match=text):
        fresh(spill_dir=tmp_path)
    with pytest.raises(memgraph.SpillError, match=text):
        compiled(batch())
    assert open_files() <= before


@pytest.mark.long
@pytest.mark.usefixtures("spilling")
def test_a_full_disk_is_an_error_of_the_first_call_and_the_call_after_it_is_emptied_works() -> None:
    module, compiled = fresh()
    before = open_files()
    with (
        failing("posix_fallocate", errno.ENOSPC),
        pytest.raises(memgraph.SpillError, match="No space left") as caught,
    ):
        compiled(batch())
    assert "spill_dir=" in str(caught.value)
    del caught
    assert open_files() <= before
    assert_next_step_right(module, compiled)


@pytest.mark.usefixtures("spilling")
def test_after_a_bad_folder_a_good_one_works(tmp_path: Path) -> None:
    (tmp_path / "missing").mkdir()
    module, compiled = fresh(spill_dir=tmp_path / "missing")
    (tmp_path / "missing").rmdir()
    with pytest.raises(memgraph.SpillError):
        compiled(batch())
    assert_next_step_right(module, memgraph.compile(module, ROOM, spill_dir=tmp_path))
    (tmp_path / "missing").mkdir()
    assert_next_step_right(module, compiled)


@pytest.mark.usefixtures("spilling")
def test_nothing_is_left_in_the_folder(tmp_path: Path) -> None:
    module, compiled = fresh(spill_dir=tmp_path)
    assert_next_step_right(module, compiled)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("spilling")
@pytest.mark.skipif(not SHM.is_dir(), reason="there is no /dev/shm")
def test_a_folder_in_ram_is_warned_of() -> None:
    _, compiled = fresh(spill_dir=SHM)
    with pytest.warns(RuntimeWarning, match="/dev/shm is in RAM"):
        compiled(batch())


@pytest.mark.usefixtures("spilling")
@pytest.mark.parametrize(("call", "verb"), [("pwritev", "write"), ("preadv", "read")])
def test_a_disk_that_fails_in_mid_step_is_an_error_and_not_a_leak(call: str, verb: str) -> None:
    module, compiled = fresh()
    step(compiled)
    files, before = open_files(), living()
    with (
        failing(call),
        pytest.raises(memgraph.SpillError, match=f"failed to {verb} .*Input/output error") as caught,
    ):
        step(compiled)
    assert "spill_dir=" in str(caught.value)
    del caught
    compiled.zero_grad()
    gradients = sum(p.nbytes for p in module.parameters())
    assert living() <= before - gradients
    assert open_files() <= files + 1
    assert_next_step_right(module, compiled)


@pytest.mark.usefixtures("spilling")
def test_a_disk_that_fails_again_and_again_takes_no_more_room() -> None:
    module, compiled = fresh()
    step(compiled)
    files = open_files()
    for call in ("pwritev", "preadv") * 3:
        with failing(call), pytest.raises(memgraph.SpillError):
            step(compiled)
    assert open_files() <= files
    assert_next_step_right(module, compiled)


@pytest.mark.usefixtures("spilling")
def test_a_forked_child_steps_too_or_says_why_it_can_not() -> None:
    module, compiled = fresh()
    step(compiled)

    def work() -> None:
        step(module)
        with suppress(memgraph.MemgraphError):
            step(compiled)

    assert forked(work).code() == 0
