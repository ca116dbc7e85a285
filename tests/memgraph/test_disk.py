from __future__ import annotations

import errno
import fcntl
import gc
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memgraph import disk, spill
from memgraph.disk import DiskLease, DiskTier, SpillError, spill_folder
from memgraph.spill import PAGE
from memgraph.workers import CHUNK, STAGING, WORKERS, submit

DTYPES = [torch.uint8, torch.bool, torch.int64, torch.bfloat16, torch.float16, torch.float32, torch.complex64]
MANY = 3 * (1 << 20) + 17
EDGES = [0, 1, PAGE - 1, PAGE, PAGE + 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1, MANY]
SHM = Path("/dev/shm")
ROOT = Path(disk.__file__).parents[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


class Gate:
    """Stands in for `os.pwritev`: says that it was reached, and writes once it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.opened, self.written = threading.Event(), threading.Event(), 0
        self.pwritev = os.pwritev
        monkeypatch.setattr(os, "pwritev", self)

    def __call__(self, file: int, views: list[memoryview], offset: int) -> int:
        self.reached.set()
        assert self.opened.wait(60)
        moved = self.pwritev(file, views, offset)
        self.written += moved
        return moved


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.opened.set()


def noise(nbytes: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(os.urandom(nbytes)), dtype=torch.uint8) if nbytes else torch.empty(0).byte()


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.flatten().view(torch.uint8).numpy().tobytes()


def round_trip(lease: DiskLease, slot: int, tensor: torch.Tensor) -> torch.Tensor:
    back = torch.empty_like(tensor)
    lease.offload(slot, tensor)
    lease.free(slot)
    lease.reload(slot, back)
    lease.wait(slot)
    return back


def fails(code: int) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return fail


def open_files(folder: Path) -> list[Path]:
    return [file for file in Path("/proc/self/fd").iterdir() if os.path.realpath(file).startswith(str(folder))]


def takes_o_direct(folder: Path) -> int:
    try:
        os.close(os.open(folder / "probe", os.O_CREAT | os.O_RDWR | os.O_DIRECT))
        return os.O_DIRECT
    except OSError:
        return 0
    finally:
        (folder / "probe").unlink()


def drain() -> None:
    """Return when the workers have forgotten whatever they did before."""
    together = threading.Barrier(WORKERS + 1)
    for _ in range(WORKERS):
        submit(together.wait)
    together.wait()


# --- what comes back


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(EDGES) | st.integers(0, MANY), max_size=6))
def test_what_comes_back_is_what_went_out(folder: Path, sizes: list[int]) -> None:
    tier = DiskTier(sizes, folder)
    lease = tier.lease()
    sent = [noise(nbytes) for nbytes in sizes]
    for slot, tensor in enumerate(sent):
        lease.offload(slot, tensor)
    back = [torch.empty_like(tensor) for tensor in sent]
    for slot in reversed(range(len(sizes))):  # as backward does; the reload waits for the copy out by itself
        lease.reload(slot, back[slot])
    for slot in reversed(range(len(sizes))):
        lease.wait(slot)
    assert all(map(torch.equal, sent, back))
    lease.release()
    tier.close()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [0, 1, 1023, 70001])
def test_every_dtype_travels(folder: Path, dtype: torch.dtype, count: int) -> None:
    sent = (noise(count * dtype.itemsize) & 1).view(dtype)
    lease = DiskTier([sent.nbytes], folder).lease()
    assert raw(round_trip(lease, 0, sent)) == raw(sent)


@pytest.mark.parametrize(
    "sent",
    [
        torch.randn(64, 48).t(),
        torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),
        torch.randn(9, 100)[3:5],
        torch.tensor(3.0),
        torch.randn(4, 0, 3),
    ],
    ids=["transposed", "channels last", "inside a storage", "scalar", "empty"],
)
def test_any_dense_layout_travels(folder: Path, sent: torch.Tensor) -> None:
    lease = DiskTier([sent.nbytes], folder).lease()
    assert torch.equal(round_trip(lease, 0, sent), sent)


def test_a_copy_back_stays_within_its_tensor(folder: Path) -> None:
    lease = DiskTier([5000], folder).lease()
    lease.offload(0, torch.ones(5000, dtype=torch.uint8))
    around = torch.zeros(10000, dtype=torch.uint8)
    lease.reload(0, around[2500:7500])
    lease.wait(0)
    assert around[2500:7500].all()
    assert not around[:2500].any()
    assert not around[7500:].any()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(99),
        torch.empty(101),
        torch.empty(200)[::2],
        torch.empty(1).expand(100),
        torch.empty(100, device="meta"),
    ],
    ids=["short", "long", "strided", "expanded", "meta"],
)
def test_what_is_not_one_run_of_the_slots_bytes_is_refused(folder: Path, tensor: torch.Tensor) -> None:
    lease = DiskTier([400], folder).lease()
    with pytest.raises(ValueError, match="a slot of 400 bytes takes a dense CPU tensor"):
        lease.offload(0, tensor)


def test_a_slot_that_holds_nothing_is_refused(folder: Path) -> None:
    lease = DiskTier([4, 4], folder).lease()
    lease.offload(0, torch.zeros(1))
    with pytest.raises(ValueError, match=r"slot 1 was not offloaded in this lease; those that were: \[0\]"):
        lease.reload(1, torch.zeros(1))
    with pytest.raises(ValueError, match="slot 0 was not reloaded"):
        lease.wait(0)


def test_the_copies_of_a_slot_take_turns(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv

    def slow(*place: Any) -> int:
        time.sleep(0.01)
        return preadv(*place)

    monkeypatch.setattr(os, "preadv", slow)
    lease = DiskTier([MANY], folder).lease()
    for _ in range(2):
        sent, once, again = noise(MANY), torch.zeros(MANY, dtype=torch.uint8), torch.zeros(MANY, dtype=torch.uint8)
        lease.offload(0, sent)
        lease.reload(0, once)
        lease.reload(0, again)
        assert torch.equal(once, sent)
        lease.offload(0, noise(MANY))
        assert torch.equal(again, sent)


def test_short_reads_and_writes_are_completed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = {name: getattr(os, name) for name in ("preadv", "pwritev")}
    for name, call in whole.items():
        monkeypatch.setattr(os, name, lambda file, views, at, call=call: call(file, [views[0][: 3 * PAGE]], at))
    lease, sent = DiskTier([MANY], folder).lease(), noise(MANY)
    assert torch.equal(round_trip(lease, 0, sent), sent)


# --- leases


def test_leases_do_not_meet(folder: Path) -> None:
    tier = DiskTier([MANY, 100], folder)
    leases, sent = [tier.lease() for _ in range(4)], [noise(MANY) for _ in range(4)]
    for lease, tensor in zip(leases, sent, strict=True):
        lease.offload(0, tensor)
    for lease, tensor in zip(leases, sent, strict=True):
        back = torch.empty_like(tensor)
        lease.reload(0, back)
        lease.wait(0)
        assert torch.equal(back, tensor)


def test_a_released_room_is_used_again(folder: Path) -> None:
    tier = DiskTier([100], folder)
    first, second = tier.lease(), tier.lease()
    rooms = {first.room, second.room}
    first.release()
    first.release()
    second.release()
    assert len(rooms) == 2
    assert {lease.room for lease in [tier.lease(), tier.lease()]} == rooms


def test_a_released_lease_does_nothing_more(folder: Path) -> None:
    lease = DiskTier([4], folder).lease()
    lease.release()
    with pytest.raises(ValueError, match="this lease is released"):
        lease.offload(0, torch.zeros(1))


def test_a_forgotten_lease_gives_its_room_back(folder: Path) -> None:
    tier = DiskTier([MANY], folder)
    lease = tier.lease()
    room = lease.room
    lease.offload(0, noise(MANY))
    lease.free(0)
    del lease
    for _ in range(10_000):  # until the worker has let go of its job, without being given another
        if not tier.rooms:
            time.sleep(0.001)
    assert tier.rooms == [room]


def test_a_tensor_is_held_until_its_copy_has_ended_and_no_longer(folder: Path) -> None:
    lease = DiskTier([MANY], folder).lease()
    sent = noise(MANY)
    seen = weakref.ref(sent)
    lease.offload(0, sent)
    del sent
    assert seen() is not None
    lease.free(0)
    assert seen() is None

    back = torch.empty(MANY, dtype=torch.uint8)
    seen = weakref.ref(back)
    lease.reload(0, back)
    lease.wait(0)
    del back
    assert seen() is None


def test_a_lease_that_is_dropped_in_the_middle_keeps_the_tensor_for_the_workers(folder: Path, gate: Gate) -> None:
    tier = DiskTier([MANY], folder)
    lease, sent = tier.lease(), noise(MANY)
    room, seen = lease.room, weakref.ref(sent)
    lease.offload(0, sent)
    assert gate.reached.wait(60)
    del lease, sent
    gc.collect()
    assert seen() is not None
    gate.opened.set()
    drain()
    assert seen() is None
    assert tier.lease().room == room


def test_a_lease_that_the_collector_releases_in_a_worker_gives_its_room_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = DiskTier([MANY], folder)
    leases, pwritev = [tier.lease()], os.pwritev
    room = leases[0].room

    def release(*place: Any) -> int:
        for lease in leases:
            lease.release()
        return pwritev(*place)

    monkeypatch.setattr(os, "pwritev", release)
    leases[0].offload(0, noise(MANY))
    drain()
    assert not tier.rooms
    leases.clear()
    assert tier.lease().room == room


def test_release_waits_for_what_runs_and_drops_what_does_not(folder: Path, gate: Gate) -> None:
    tier = DiskTier([PAGE] * 5, folder)
    lease, sent = tier.lease(), [noise(PAGE) for _ in range(5)]
    for slot, tensor in enumerate(sent):
        lease.offload(slot, tensor)
        lease.reload(slot, tensor)
    assert gate.reached.wait(60)
    release = threading.Thread(target=lease.release)
    release.start()
    while not lease.dropped:
        time.sleep(0.001)
    assert release.is_alive()
    assert not tier.rooms
    gate.opened.set()
    release.join()
    assert len(tier.rooms) == 1
    written = gate.written
    drain()
    assert 0 < written == gate.written <= WORKERS * PAGE


def test_release_works_after_an_interrupt(folder: Path, gate: Gate) -> None:
    tier = DiskTier([MANY], folder)
    lease, sent = tier.lease(), noise(MANY)
    lease.offload(0, sent)
    waiting, main = threading.Event(), threading.get_ident()

    def interrupt() -> None:
        assert waiting.wait(60)
        signal.pthread_kill(main, signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        waiting.set()
        lease.free(0)
    interrupter.join()
    gate.opened.set()
    lease.release()
    assert torch.equal(round_trip(tier.lease(), 0, sent), sent)


# --- what goes wrong


def test_a_failed_copy_out_is_told_each_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = DiskTier([MANY, 100], folder)
    lease, sent = tier.lease(), noise(MANY)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", fails(errno.EIO))
        lease.offload(0, sent)
        for _ in range(2):
            with pytest.raises(SpillError, match=f"failed to write {MANY} bytes in {folder}: .*Input/output error"):
                lease.free(0)
    lease.reload(0, sent)
    for _ in range(2):
        with pytest.raises(SpillError, match="Input/output error"):
            lease.wait(0)
    assert torch.equal(round_trip(lease, 1, sent[:100]), sent[:100])
    room = lease.room
    drain()
    del lease  # no error holds it
    again = tier.lease()
    assert again.room == room
    assert torch.equal(round_trip(again, 0, sent), sent)


def test_a_failed_copy_back_is_told_each_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = DiskTier([MANY], folder)
    lease, sent = tier.lease(), noise(MANY)
    lease.offload(0, sent)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fails(errno.EIO))
        lease.reload(0, torch.empty_like(sent))
        for _ in range(2):
            with pytest.raises(SpillError, match=f"failed to read {MANY} bytes in {folder}: .*Input/output error"):
                lease.wait(0)
    back = torch.empty_like(sent)
    lease.reload(0, back)
    lease.wait(0)
    assert torch.equal(back, sent)


def test_a_file_that_was_cut_is_an_error(folder: Path) -> None:
    lease = DiskTier([MANY], folder).lease()
    assert lease.room is not None
    lease.offload(0, noise(MANY))
    lease.free(0)
    os.ftruncate(lease.room, PAGE)
    lease.reload(0, torch.empty(MANY, dtype=torch.uint8))
    with pytest.raises(SpillError, match=r"the file ended .* bytes early"):
        lease.wait(0)


def test_what_the_disk_does_not_have_is_refused_before_it_is_taken(folder: Path) -> None:
    with pytest.raises(
        SpillError, match=rf"{1 << 60} bytes are wanted .* in {folder}, \d+ are available; .*spill_dir="
    ):
        DiskTier([1 << 60], folder)


def test_a_disk_that_fills_up_meanwhile_is_an_error_before_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = DiskTier([MANY], tmp_path)
    first = tier.lease()
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", fails(errno.ENOSPC))
        with pytest.raises(SpillError, match=r"cannot make a file of .* No space left on device"):
            tier.lease()
    assert len(open_files(tmp_path)) == 1
    first.release()
    tier.lease()


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("file", "missing"):
        with pytest.raises(SpillError, match=f"activations cannot go to .*{name}: it is not a folder"):
            DiskTier([4], tmp_path / name)


def test_a_folder_that_takes_no_files_is_refused() -> None:
    with pytest.raises(SpillError, match=f"cannot make a file of {PAGE} bytes for activations in /proc"):
        DiskTier([4], "/proc")


@pytest.mark.skipif(not SHM.is_dir() or not spill.is_ram(SHM), reason="/dev/shm is not in RAM")
def test_a_folder_in_ram_is_warned_of() -> None:
    with pytest.warns(
        RuntimeWarning, match="/dev/shm is in RAM, so what is offloaded there frees no memory.*spill_dir="
    ):
        tier = DiskTier([MANY], SHM)
    sent = noise(MANY)
    assert torch.equal(round_trip(tier.lease(), 0, sent), sent)


# --- the file


def test_the_file_has_no_name_and_all_its_blocks(tmp_path: Path) -> None:
    tier = DiskTier([1, 0, MANY], tmp_path)
    lease = tier.lease()
    assert lease.room is not None
    file = os.fstat(lease.room)
    assert (stat.S_IMODE(file.st_mode), file.st_nlink) == (0o600, 0)
    assert file.st_blocks * 512 >= file.st_size == tier.nbytes == PAGE + spill.pages(MANY)
    assert fcntl.fcntl(lease.room, fcntl.F_GETFL) & os.O_DIRECT == takes_o_direct(tmp_path)
    assert not list(tmp_path.iterdir())
    lease.release()
    tier.close()
    assert not list(tmp_path.iterdir())


def test_closing_closes_every_file(tmp_path: Path) -> None:
    tier = DiskTier([100], tmp_path)
    first, second = tier.lease(), tier.lease()
    first.release()
    assert len(open_files(tmp_path)) == 2
    tier.close()
    tier.close()
    assert torch.equal(round_trip(second, 0, torch.ones(25)), torch.ones(25))
    second.release()
    assert not open_files(tmp_path)
    with pytest.raises(ValueError, match="this tier is closed"):
        tier.lease()


def test_a_forgotten_tier_closes_its_files(tmp_path: Path) -> None:
    tier = DiskTier([100], tmp_path)
    lease = DiskTier([100], tmp_path).lease()
    assert len(open_files(tmp_path)) == 2
    del tier, lease
    assert not open_files(tmp_path)


def test_it_works_without_nameless_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = os.open

    def refuse(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return plain(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refuse)
    lease, sent = DiskTier([MANY], tmp_path).lease(), noise(MANY)
    assert lease.room is not None
    file = os.fstat(lease.room)
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
    else:
        monkeypatch.setattr(os, "pwrite", fails(errno.EINVAL))
    lease, sent = DiskTier([MANY], folder).lease(), noise(MANY)
    assert lease.room is not None
    assert not plain(lease.room, fcntl.F_GETFL) & os.O_DIRECT
    assert torch.equal(round_trip(lease, 0, sent), sent)


def test_a_process_that_ends_in_the_middle_of_a_copy_ends_well(folder: Path) -> None:
    code = f"""
import atexit, torch
from memgraph.disk import DiskTier
atexit.register(lambda: print(*[part.closed for copy in [*lease.out.values(), *lease.back.values()] for part in copy.parts]))
tier = DiskTier([1 << 24] * 2, {str(folder)!r})
lease = tier.lease()
lease.offload(0, torch.ones(1 << 22))
lease.offload(1, torch.ones(1 << 22))
lease.reload(0, torch.ones(1 << 22))
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "False False False False False False\n", "")
    assert not list(folder.iterdir())


# --- where, and how fast


def test_a_folder_that_was_given_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    assert spill_folder("there") == tmp_path / "there"
    assert spill_folder(tmp_path) == tmp_path


@pytest.mark.skipif(not SHM.is_dir() or not spill.is_ram(SHM), reason="/dev/shm is not in RAM")
def test_a_temporary_folder_in_ram_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(SHM))
    lasting = Path("/var/tmp")
    on_disk = os.access(lasting, os.W_OK) and not spill.is_ram(lasting)
    assert spill_folder() == (lasting if on_disk else SHM)
    assert spill_folder(SHM) == SHM


def test_the_tiers_of_a_process_share_their_buffers(folder: Path) -> None:
    tiers = [DiskTier([MANY], folder) for _ in range(3)]
    assert {tier.staging for tier in tiers} == {STAGING}
    sent = noise(MANY)
    assert all(torch.equal(round_trip(tier.lease(), 0, sent), sent) for tier in tiers)
    assert sum(thread.name.startswith("memgraph-disk") for thread in threading.enumerate()) == WORKERS
