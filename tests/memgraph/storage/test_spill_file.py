"""Files of a tier: where they are made, how they are opened, and that none is left."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from memgraph.storage import file_tier, spill_file
from memgraph.storage.file_tier import FileTier
from memgraph.storage.spill_file import PAGE, spill_folder
from tests.support.faults import failing
from tests.support.slow_disk import MANY, SHM, files_in, noise, round_trip

ROOT = Path(file_tier.__file__).parents[2]


def test_the_file_has_no_name_and_all_its_blocks(tmp_path: Path) -> None:
    tier = FileTier([1, 0, MANY], tmp_path)
    lease = tier.lease()
    assert lease.file is not None
    file = os.fstat(lease.file)
    assert (stat.S_IMODE(file.st_mode), file.st_nlink) == (0o600, 0)
    assert file.st_blocks * 512 >= file.st_size == tier.nbytes == PAGE + spill_file.whole_pages(MANY)
    assert fcntl.fcntl(lease.file, fcntl.F_GETFL) & os.O_DIRECT == takes_o_direct(tmp_path)
    assert not list(tmp_path.iterdir())
    lease.release()
    tier.close()
    assert not list(tmp_path.iterdir())


def test_closing_closes_every_file(tmp_path: Path) -> None:
    tier = FileTier([100], tmp_path)
    first, second = tier.lease(), tier.lease()
    first.release()
    assert len(files_in(tmp_path)) == 2
    tier.close()
    tier.close()
    assert torch.equal(round_trip(second, 0, torch.ones(25)), torch.ones(25))
    second.release()
    assert not files_in(tmp_path)
    with pytest.raises(ValueError, match="this tier is closed"):
        tier.lease()


def test_a_forgotten_tier_closes_its_files(tmp_path: Path) -> None:
    tier = FileTier([100], tmp_path)
    lease = FileTier([100], tmp_path).lease()
    assert len(files_in(tmp_path)) == 2
    del tier, lease
    assert not files_in(tmp_path)


def test_it_works_without_nameless_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = os.open

    def refuse(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return plain(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refuse)
    lease, sent = FileTier([MANY], tmp_path).lease(), noise(MANY)
    assert lease.file is not None
    file = os.fstat(lease.file)
    assert (stat.S_IMODE(file.st_mode), file.st_nlink) == (0o600, 0)
    assert not list(tmp_path.iterdir())
    assert torch.equal(round_trip(lease, 0, sent), sent)


@pytest.mark.parametrize("name", ["fcntl", "pwrite"])
def test_it_works_without_o_direct(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    plain = fcntl.fcntl

    def refuse(file: int, command: int, flags: int = 0) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return plain(file, command, flags)

    if name == "fcntl":
        monkeypatch.setattr(fcntl, "fcntl", refuse)
    with failing("pwrite", errno.EINVAL, name == "pwrite"):
        lease, sent = FileTier([MANY], folder).lease(), noise(MANY)
    assert lease.file is not None
    assert not plain(lease.file, fcntl.F_GETFL) & os.O_DIRECT
    assert torch.equal(round_trip(lease, 0, sent), sent)


@pytest.mark.long
def test_a_process_that_ends_in_the_middle_of_a_copy_ends_well(folder: Path) -> None:
    code = f"""
import atexit, torch
from memgraph.storage.file_tier import FileTier
atexit.register(lambda: print(*[chunk.is_set for copy in [*lease.out.values(), *lease.back.values()] for chunk in copy.chunks]))
tier = FileTier([1 << 24] * 2, {str(folder)!r})
lease = tier.lease()
lease.offload(0, torch.ones(1 << 22))
lease.offload(1, torch.ones(1 << 22))
lease.reload(0, torch.ones(1 << 22))
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "True True True True True True\n", "")
    assert not list(folder.iterdir())


def test_a_folder_that_was_given_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    assert spill_folder("there") == tmp_path / "there"
    assert spill_folder(tmp_path) == tmp_path


@pytest.mark.skipif(not SHM.is_dir() or not spill_file.is_ram(SHM), reason="/dev/shm is not in RAM")
def test_a_temporary_folder_in_ram_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(SHM))
    lasting = Path("/var/tmp")
    on_disk = os.access(lasting, os.W_OK) and not spill_file.is_ram(lasting)
    assert spill_folder() == (lasting if on_disk else SHM)
    assert spill_folder(SHM) == SHM


def takes_o_direct(folder: Path) -> int:
    try:
        os.close(os.open(folder / "probe", os.O_CREAT | os.O_RDWR | os.O_DIRECT))
        return os.O_DIRECT
    except OSError:
        return 0
    finally:
        (folder / "probe").unlink()
