"""A disk that fails, fills up or does not exist is an error that says where and what to do."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from memgraph.storage import spill_file
from memgraph.storage.file_tier import FileTier
from memgraph.storage.spill_file import PAGE, SpillError
from tests.support.faults import failing
from tests.support.slow_disk import MANY, SHM, drain, files_in, noise, round_trip


def test_a_failed_copy_out_is_told_each_time(folder: Path) -> None:
    tier = FileTier([MANY, 100], folder)
    lease, sent = tier.lease(), noise(MANY)
    with failing("pwritev"):
        lease.offload(0, sent)
        for _ in range(2):
            with pytest.raises(SpillError, match=f"failed to write {MANY} bytes in {folder}: .*Input/output error"):
                lease.free(0)
    lease.reload(0, sent)
    for _ in range(2):
        with pytest.raises(SpillError, match="Input/output error"):
            lease.wait(0)
    assert torch.equal(round_trip(lease, 1, sent[:100]), sent[:100])
    room = lease.file
    drain()
    del lease  # no error holds it
    again = tier.lease()
    assert again.file == room
    assert torch.equal(round_trip(again, 0, sent), sent)


def test_a_failed_copy_back_is_told_each_time(folder: Path) -> None:
    tier = FileTier([MANY], folder)
    lease, sent = tier.lease(), noise(MANY)
    lease.offload(0, sent)
    with failing("preadv"):
        lease.reload(0, torch.empty_like(sent))
        for _ in range(2):
            with pytest.raises(SpillError, match=f"failed to read {MANY} bytes in {folder}: .*Input/output error"):
                lease.wait(0)
    back = torch.empty_like(sent)
    lease.reload(0, back)
    lease.wait(0)
    assert torch.equal(back, sent)


def test_a_file_that_was_cut_is_an_error(folder: Path) -> None:
    lease = FileTier([MANY], folder).lease()
    assert lease.file is not None
    lease.offload(0, noise(MANY))
    lease.free(0)
    os.ftruncate(lease.file, PAGE)
    lease.reload(0, torch.empty(MANY, dtype=torch.uint8))
    with pytest.raises(SpillError, match=r"the file ended .* bytes early"):
        lease.wait(0)


def test_what_the_disk_does_not_have_is_refused_before_it_is_taken(folder: Path) -> None:
    with pytest.raises(
        SpillError, match=rf"{1 << 60} bytes are wanted .* in {folder}, \d+ are available; .*spill_dir="
    ):
        FileTier([1 << 60], folder)


def test_a_disk_that_fills_up_meanwhile_is_an_error_before_a_step(tmp_path: Path) -> None:
    tier = FileTier([MANY], tmp_path)
    first = tier.lease()
    with (
        failing("posix_fallocate", errno.ENOSPC),
        pytest.raises(SpillError, match=r"cannot make a file of .* No space left on device"),
    ):
        tier.lease()
    assert len(files_in(tmp_path)) == 1
    first.release()
    tier.lease()


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("file", "missing"):
        with pytest.raises(SpillError, match=f"activations cannot go to .*{name}: it is not a folder"):
            FileTier([4], tmp_path / name)


def test_a_folder_that_takes_no_files_is_refused() -> None:
    with pytest.raises(SpillError, match=f"cannot make a file of {PAGE} bytes for activations in /proc"):
        FileTier([4], "/proc")


@pytest.mark.skipif(not SHM.is_dir() or not spill_file.is_ram(SHM), reason="/dev/shm is not in RAM")
def test_a_folder_in_ram_is_warned_of() -> None:
    with pytest.warns(
        RuntimeWarning, match="/dev/shm is in RAM, so what is offloaded there frees no memory.*spill_dir="
    ):
        tier = FileTier([MANY], SHM)
    sent = noise(MANY)
    assert torch.equal(round_trip(tier.lease(), 0, sent), sent)
