"""A sharded checkpoint with a flipped bit is refused, code in one never runs, and one that a save has put aside is not
taken for a newer one."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import memgraph
from memgraph import StateError
from memgraph.oss.checkpoint import checkpoint_folder
from memgraph.oss.checkpoint.checkpoint_folder import Reader
from memgraph.oss.comm import watchdog
from tests.memgraph.oss.checkpoint.test_full_state import refusal, same
from tests.memgraph.oss.checkpoint.test_sharded_state import ordered, trained
from tests.support.ranks import on_ranks


class Run:
    """A pickle that makes a folder when it is loaded."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def _damaged(rank: int, path: Path) -> list[str]:
    module, ours = trained("Adam", 2)
    memgraph.save_sharded(path, module, ours)
    messages = []
    for name, wanted in ("__1_0.distcp", b""), ("__0_0.distcp", b""), (".metadata", b"exp_avg"), ("__1.crc32", b"[["):
        found = path / name
        whole = found.read_bytes()
        torch.distributed.barrier()
        if rank == 0:
            data = bytearray(whole)
            data[whole.index(wanted) if wanted else _at_a_number(whole)] ^= 1
            found.write_bytes(data)
        torch.distributed.barrier()
        before, weights = ours.state_dict(all_ranks=True), [p.detach().clone() for p in module.parameters()]
        messages.append(refusal(StateError, memgraph.load_sharded, path, module, ours))
        assert same(ordered(before), ordered(ours.state_dict(all_ranks=True)))
        assert all(map(torch.equal, weights, module.parameters()))
        torch.distributed.barrier()
        if rank == 0:
            found.write_bytes(whole)
        torch.distributed.barrier()
    memgraph.load_sharded(path, module, ours)
    if rank == 0:
        _without_checksums(path)
    torch.distributed.barrier()
    memgraph.load_sharded(path, module, ours)
    return messages


def _without_checksums(path: Path) -> None:
    """Make a folder one of a version that wrote none."""
    for notes in path.glob("*.crc32"):
        notes.unlink()
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for name in [name for name in metadata.state_dict_metadata if name.startswith("checksums.")]:
        del metadata.state_dict_metadata[name]
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def _at_a_number(whole: bytes) -> int:
    """Within the numbers of the last tensor in a file."""
    return whole.rindex(b"/data/0") + 96


def test_what_is_damaged_is_named_on_all_ranks_and_nothing_is_changed(tmp_path: Path) -> None:
    first, second = on_ranks(2, _damaged, tmp_path / "run")
    assert first == second
    for text in first:
        assert "was damaged since it was written" in text or "is damaged" in text
    assert all("__1_0.distcp; continue from an earlier one" in text for text in first[:1])


def _foreign(rank: int, path: Path) -> list[str]:
    module, ours = trained("Adam", 1)
    memgraph.save_sharded(path / "run", module, ours)
    _without_checksums(path / "run")
    listed = (path / "run" / ".metadata").read_bytes()
    (path / "run" / ".metadata").write_bytes(pickle.dumps(Run(f"{path}/by the list")))
    messages = [refusal(StateError, memgraph.load_sharded, path / "run", module, ours)]

    found = pickle.loads(listed)
    index = next(each for each in found.storage_data if each.fqn == "optimizer.param_groups.0.lr")
    content = io.BytesIO()
    torch.save(Run(f"{path}/by a number"), content)
    info = found.storage_data[index]
    (path / "run" / "foreign").write_bytes(content.getvalue())
    info.relative_path, info.offset, info.length = "foreign", 0, len(content.getvalue())
    (path / "run" / ".metadata").write_bytes(pickle.dumps(found))
    messages.append(refusal(StateError, memgraph.load_sharded, path / "run", module, ours))
    return messages


def test_nothing_in_a_checkpoint_is_run(tmp_path: Path) -> None:
    (messages,) = on_ranks(1, _foreign, tmp_path)
    assert os.listdir(tmp_path) == ["run"]
    assert "posix.mkdir does not belong there" in messages[0]
    assert "Weights only load failed" in messages[1] or "posix.mkdir" in messages[1]


@pytest.mark.parametrize("name", ["__init__.__globals__", "Metadata.__class__", "serialization.os.mkdir", "load"])
def test_a_name_with_dots_leads_nowhere(tmp_path: Path, name: str) -> None:
    for module in ("torch", "torch.distributed.checkpoint.metadata"):
        data = b"\x80\x04\x8c" + bytes([len(module)]) + module.encode() + b"\x8c" + bytes([len(name)]) + name.encode()
        (tmp_path / ".metadata").write_bytes(data + b"\x93.")
        with pytest.raises(pickle.UnpicklingError, match="does not belong there"):
            Reader(tmp_path).read_metadata()


def _without_exchange(rank: int, path: Path, moment: str, rate: float) -> None:
    """Save where two folders can't have each other's name at once, and let rank 0 die at a moment of that."""
    watchdog.SILENCE = 2.4  # seconds of silence; a connection that is closed is heard at once
    plain = os.rename

    def rename(one: Any, other: Any) -> None:
        if moment == "between" and other == path:
            os.kill(os.getpid(), signal.SIGKILL)
        plain(one, other)

    def remove(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    module, ours = trained("Adam", 1)
    ours.param_groups[0]["lr"] = rate
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_folder, "_exchange_names", lambda *_: False)
        patch.setattr(os, "rename", rename)
        if moment == "after":
            patch.setattr(shutil, "rmtree", remove)
        with nullcontext() if moment == "never" else pytest.raises(memgraph.CollectiveError):
            memgraph.save_sharded(path, module, ours)


def _rate(rank: int, path: Path) -> float | str:
    module, ours = trained("Adam", 1)
    try:
        memgraph.load_sharded(path, module, ours)
    except StateError as error:
        return str(error)
    rate: float = ours.param_groups[0]["lr"]
    return rate


@pytest.mark.long
def test_a_folder_that_a_save_has_put_aside_is_loaded_only_until_the_next_save(tmp_path: Path) -> None:
    path = tmp_path / "run"
    on_ranks(1, _without_exchange, path, "never", 1.0)
    on_ranks(2, _without_exchange, path, "between", 2.0, lost=[0])
    assert sorted(os.listdir(tmp_path)) == [".run.new", ".run.old"]
    assert on_ranks(1, _rate, path) == [1.0]  # the old one, which has lost its name
    on_ranks(1, _without_exchange, path, "never", 3.0)
    assert os.listdir(tmp_path) == ["run"]
    assert on_ranks(1, _rate, path) == [3.0]
    on_ranks(2, _without_exchange, path, "after", 4.0, lost=[0])
    assert sorted(os.listdir(tmp_path)) == [".run.old", "run"]
    assert on_ranks(1, _rate, path) == [4.0]
    shutil.rmtree(path)
    assert "there is no checkpoint" in str(on_ranks(1, _rate, path))
    on_ranks(1, _without_exchange, path, "never", 5.0)
    assert os.listdir(tmp_path) == ["run"]
