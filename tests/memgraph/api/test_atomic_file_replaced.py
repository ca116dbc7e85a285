"""A save takes the place of a regular file alone: links, modes and whatever is no file stay what they are."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from memgraph import StateError
from memgraph.api import atomic_file
from memgraph.api.training_state import load_state, save_state

NAMES = pytest.mark.parametrize("name", ["run.pt", "run.safetensors"])


@pytest.fixture(autouse=True, params=[False, True], ids=["nameless", "by name"])
def opened(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:  # as on a file system without nameless files
        monkeypatch.setattr(atomic_file, "_open_new", atomic_file._open_named)


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@NAMES
def test_a_pipe_is_neither_replaced_nor_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    os.mkfifo(path)
    with pytest.raises(StateError, match=r"is a named pipe \(FIFO\), and has to be a regular file"):
        save_state(path, nn.Linear(2, 2))
    with pytest.raises(StateError, match=r"is a named pipe \(FIFO\), and has to be a regular file"):
        load_state(path, nn.Linear(2, 2))
    assert stat.S_ISFIFO(path.lstat().st_mode)
    assert os.listdir(tmp_path) == [name]


@NAMES
@pytest.mark.parametrize("is_there", [False, True])
def test_a_symbolic_link_stays_and_its_target_is_written(tmp_path: Path, name: str, is_there: bool) -> None:
    far = tmp_path / "far"
    far.mkdir()
    (tmp_path / name).symlink_to(Path("far") / "target")
    if is_there:
        save_state(far / "target", nn.Linear(2, 2))
    model = nn.Linear(2, 2)
    save_state(tmp_path / name, model)
    assert (tmp_path / name).is_symlink()
    assert os.listdir(far) == ["target"]
    other = nn.Linear(2, 2)
    load_state(tmp_path / name, other)
    assert torch.equal(model.weight, other.weight)


@NAMES
def test_a_new_file_has_the_mode_of_the_umask(tmp_path: Path, name: str, umask: None) -> None:
    save_state(tmp_path / name, nn.Linear(2, 2))
    assert mode(tmp_path / name) == 0o640


@NAMES
@pytest.mark.parametrize("wanted", [0o600, 0o644, 0o444, 0o666])
def test_a_replaced_file_keeps_its_mode(tmp_path: Path, name: str, wanted: int, umask: None) -> None:
    path = tmp_path / name
    save_state(path, nn.Linear(2, 2))
    path.chmod(wanted)
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    save_state(path, model)
    assert mode(path) == wanted
    load_state(path, other)
    assert torch.equal(model.weight, other.weight)


def test_links_in_a_circle_are_refused(tmp_path: Path) -> None:
    (tmp_path / "one.pt").symlink_to("two.pt")
    (tmp_path / "two.pt").symlink_to("one.pt")
    with pytest.raises(StateError, match="Too many levels of symbolic links"):
        save_state(tmp_path / "one.pt", nn.Linear(2, 2))
    assert (tmp_path / "one.pt").is_symlink()
