"""Ctrl-C while a training is saved or loaded: the file is the old one, nothing lies beside it, and no state is torn."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memgraph.api import atomic_file, training_state
from memgraph.api.training_state import load_state, save_state


def training() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(64, 64)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    return model, optimizer


def interrupting(plain: Callable[..., Any], call: int = 1) -> Callable[..., Any]:
    """The function, with a Ctrl-C as its `call`-th call ends."""
    calls = iter(range(1, 1000))

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        found = plain(*args, **kwargs)
        if next(calls) == call:
            signal.raise_signal(signal.SIGINT)
        return found

    return interrupted


@pytest.mark.parametrize("name", ["run.pt", "run.safetensors"])
def test_an_interrupt_as_the_file_is_made_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    save_state(tmp_path / name, *training())
    before = (tmp_path / name).read_bytes()
    monkeypatch.setattr(atomic_file, "_open_new", interrupting(atomic_file._open_new))
    with pytest.raises(KeyboardInterrupt):
        save_state(tmp_path / name, *training())
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {name: before}


@pytest.mark.parametrize("call", [1, 2, 5])
def test_an_interrupt_amid_the_writing_is_raised_as_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    save_state(tmp_path / "run.pt", *training())
    before = (tmp_path / "run.pt").read_bytes()
    monkeypatch.setattr(training_state._Sink, "write", interrupting(training_state._Sink.write, call))
    with pytest.raises(KeyboardInterrupt):
        save_state(tmp_path / "run.pt", *training())
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"run.pt": before}


def test_an_interrupt_amid_the_loading_waits_for_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved, optimizer = training()
    save_state(tmp_path / "run.pt", saved, optimizer)
    model, other = training()
    monkeypatch.setattr(torch.optim.Adam, "load_state_dict", interrupting(torch.optim.Adam.load_state_dict))
    with pytest.raises(KeyboardInterrupt):
        load_state(tmp_path / "run.pt", model, other)
    assert all(map(torch.equal, model.parameters(), saved.parameters()))
    assert torch.equal(
        other.state[next(model.parameters())]["exp_avg"], optimizer.state[next(saved.parameters())]["exp_avg"]
    )
