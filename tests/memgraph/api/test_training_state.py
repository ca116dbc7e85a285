"""A training that was saved goes on bit for bit, and a file is whole or not there."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memgraph
from memgraph.api.training_state import load_state, save_state
from memgraph.errors import StateError
from memgraph.storage.mapped_storage import buffer_slice_of
from tests.support.limits import files_of_at_most


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(256, 512), nn.BatchNorm1d(512), nn.GELU(), nn.Dropout(0.2), nn.Linear(512, 512), nn.Linear(512, 8)
    )


def narrower() -> nn.Module:
    _, *rest = net().children()
    return nn.Sequential(nn.Linear(64, 512), *rest)


def loss(out: Tensor) -> Tensor:
    return out.square().mean()


def train(called: Any, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        value = called(torch.randn(16, 256))
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(value.item())
    return found


class Plain(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return loss(self.module(x))


def compiled(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return memgraph.compile(model, 3_600_000, loss=loss, optimizer=optimizer)


def plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return Plain(model)


@pytest.mark.long
@pytest.mark.parametrize("second", [plain, compiled])
@pytest.mark.parametrize("first", [plain, compiled])
def test_a_training_goes_on_bit_for_bit(tmp_path: Path, first: Callable[..., Any], second: Callable[..., Any]) -> None:
    model = net()
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    called = first(model, adam)
    torch.manual_seed(1)
    train(called, adam, 3)
    save_state(tmp_path / "run.pt", model, adam)
    expected = train(called, adam, 3)

    other = net()
    fresh = torch.optim.AdamW(other.parameters(), lr=1e-2)
    again = second(other, fresh)
    if second is compiled:
        train(again, fresh, 1)  # what lives on disk by then is loaded there
        states = [tensor for state in fresh.state.values() for tensor in state.values()]
        assert any(buffer_slice_of(tensor) for tensor in (*other.parameters(), *states))
    load_state(tmp_path / "run.pt", other, fresh)
    assert train(again, fresh, 3) == expected
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))


@pytest.mark.long
def test_plain_torch_loads_it(tmp_path: Path) -> None:
    model = net()
    adam = torch.optim.AdamW(model.parameters())
    train(compiled(model, adam), adam, 2)
    save_state(tmp_path / "run.pt", model, adam)
    state = torch.load(tmp_path / "run.pt", weights_only=True)
    other = net()
    other.load_state_dict(state["model"])
    torch.optim.AdamW(other.parameters()).load_state_dict(state["optimizer"])
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))


def test_a_save_that_fails_leaves_the_file_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    save_state(tmp_path / "run.pt", model)
    before = (tmp_path / "run.pt").read_bytes()

    def fail(file: int) -> None:
        raise OSError("the disk is gone")

    with monkeypatch.context() as patch, pytest.raises(StateError, match="the disk is gone"):
        patch.setattr(os, "fsync", fail)
        save_state(tmp_path / "run.pt", model)
    assert (tmp_path / "run.pt").read_bytes() == before
    assert os.listdir(tmp_path) == ["run.pt"]


@pytest.mark.parametrize("allowed", [0, 1000, 300_000])
def test_a_save_that_has_no_room_says_so_and_leaves_the_file_before(tmp_path: Path, allowed: int) -> None:
    model = net()
    save_state(tmp_path / "run.pt", model)
    before = (tmp_path / "run.pt").read_bytes()
    assert len(before) > 300_000
    with files_of_at_most(allowed), pytest.raises(StateError, match=r"run.pt can't be written: File too large.*ulimit"):
        save_state(tmp_path / "run.pt", model)
    assert (tmp_path / "run.pt").read_bytes() == before
    assert os.listdir(tmp_path) == ["run.pt"]


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StateError, match=r"run.pt can't be written: No space left on device; free some space"):
        save_state(tmp_path / "run.pt", net())
    assert not os.listdir(tmp_path)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"none/run.pt can't be written: No such file"):
        save_state(tmp_path / "none" / "run.pt", net())


def test_what_is_no_fault_of_the_disk_keeps_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("not the disk")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(RuntimeError, match="not the disk") as caught:
        save_state(tmp_path / "run.pt", net())
    assert not isinstance(caught.value, StateError)
    assert not os.listdir(tmp_path)


def test_what_is_no_state_or_of_another_model_changes_nothing(tmp_path: Path) -> None:
    model = net()
    adam = torch.optim.AdamW(model.parameters())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    (tmp_path / "junk").write_bytes(b"no state")
    torch.save({"model": {}}, tmp_path / "foreign")
    save_state(tmp_path / "smaller", nn.Sequential(nn.Linear(256, 512)))
    save_state(tmp_path / "bare", model)
    save_state(tmp_path / "shape", narrower(), adam)
    sgd = torch.optim.AdamW([{"params": [p]} for p in net().parameters()])
    save_state(tmp_path / "groups", net(), sgd)
    for name, words in {
        "junk": "can't be read",
        "foreign": "no training state",
        "smaller": "another model",
        "bare": "has no optimizer's state",
        "shape": "in the file and",
        "groups": "another optimizer",
    }.items():
        with pytest.raises(StateError, match=words):
            load_state(tmp_path / name, model, adam)
    with pytest.raises(FileNotFoundError):
        load_state(tmp_path / "nothing", model, adam)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert not adam.state
