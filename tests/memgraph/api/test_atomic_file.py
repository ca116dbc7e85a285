"""A save that is killed leaves the file before, and nothing beside it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memgraph.api import atomic_file, safetensors_file, training_state
from memgraph.api.training_state import load_state, save_state
from tests.support.forks import forked

MOMENTS: dict[str, tuple[object, str]] = {"fsync": (os, "fsync"), "rename": (os, "replace")}


def net(value: float) -> nn.Linear:
    model = nn.Linear(64, 64)
    nn.init.constant_(model.weight, value)
    return model


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed(work: Callable[[], None]) -> None:
    """Run this in a child, which is to be killed."""
    assert forked(work).code() == -signal.SIGKILL


def save_and_die(path: Path, moment: str, by_name: bool) -> None:
    content = (safetensors_file, "numbers") if path.suffix == ".safetensors" else (training_state._Sink, "write")
    owner, name = MOMENTS.get(moment, content)
    setattr(owner, name, die)
    if by_name:
        atomic_file._open_new = atomic_file._open_named
    save_state(path, net(2))


@pytest.mark.parametrize("moment", ["content", *MOMENTS])
@pytest.mark.parametrize("name", ["run.pt", "run.safetensors"])
def test_a_save_that_is_killed_leaves_nothing(tmp_path: Path, name: str, moment: str) -> None:
    path = tmp_path / name
    save_state(path, net(1))
    before = path.read_bytes()
    killed(lambda: save_and_die(path, moment, by_name=False))
    beside = set(os.listdir(tmp_path)) - {name}
    assert len(beside) == (moment == "rename")  # between the two names, and until the next save
    assert path.read_bytes() == before
    save_state(path, net(3))
    assert os.listdir(tmp_path) == [name]
    model = net(0)
    load_state(path, model)
    assert torch.equal(model.weight, net(3).weight)


def test_where_each_file_has_a_name_the_next_save_removes_what_a_killed_one_has_left(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    killed(lambda: save_and_die(path, "fsync", by_name=True))
    assert len(os.listdir(tmp_path)) == 1
    save_state(tmp_path / "other.pt", net(1))  # which has nothing to do with it
    assert len(os.listdir(tmp_path)) == 2
    save_state(path, net(1))
    assert set(os.listdir(tmp_path)) == {"run.pt", "other.pt"}


def test_what_another_process_is_writing_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    file, name = atomic_file._open_named(path)
    users = tmp_path / ".run.pt.settings"
    users.write_text("mine")
    save_state(path, net(1))
    assert set(os.listdir(tmp_path)) == {"run.pt", users.name, Path(name).name}
    os.close(file)
    save_state(path, net(1))
    assert set(os.listdir(tmp_path)) == {"run.pt", users.name}


@pytest.mark.parametrize("name", ["run.pt", "run.safetensors"])
def test_files_without_a_name_are_not_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(atomic_file, "OPEN", "/nowhere")
    save_state(tmp_path / name, net(1))
    model = net(0)
    load_state(tmp_path / name, model)
    assert torch.equal(model.weight, net(1).weight)
    assert os.listdir(tmp_path) == [name]
