"""Loaded state belongs to the process: training goes on unchanged, whatever happens to the file."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import memgraph
from memgraph.api.training_state import load_state, save_state
from memgraph.profile.memory_meter import measure_peak
from memgraph.storage.mapped_storage import buffer_slice_of
from tests.support.forks import forked

FORMATS = ["run.pt", "run.safetensors"]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last), nn.Flatten(), nn.Linear(8 * 36, 64))  # type: ignore[call-overload]


def train(model: Any, optimizer: optim.Optimizer, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        loss = model(torch.randn(4, 3, 8, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def overwrite(path: Path) -> None:
    """As rsync --inplace does."""
    size = path.stat().st_size
    with open(path, "r+b") as file:
        file.write(b"\x41" * size)


def states(optimizer: optim.Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Round as a child of `fork` does, which has one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", [optim.Adam, partial(optim.SGD, lr=0.1, momentum=0.9)])
def test_overwriting_and_cutting_the_file_changes_nothing(tmp_path: Path, name: str, kind: Any) -> None:
    model = net()
    optimizer = kind(model.parameters())
    train(model, optimizer, 2)
    save_state(tmp_path / name, model, optimizer)
    expected = train(model, optimizer, 3)

    other = net()
    fresh = kind(other.parameters())
    load_state(tmp_path / name, other, fresh)
    overwrite(tmp_path / name)
    assert train(other, fresh, 1) == expected[:1]

    def work() -> bool:  # which a page that is gone would end
        os.truncate(tmp_path / name, 0)
        return train(other, fresh, 2) == expected[1:]

    assert forked(work).code() == 0


def test_what_a_module_keeps_of_its_own_is_not_in_the_file(tmp_path: Path) -> None:
    class Extra(nn.Linear):
        extra: Any = None

        def get_extra_state(self) -> Any:
            return self.extra

        def set_extra_state(self, state: Any) -> None:
            self.extra = state

    model = Extra(2, 2)
    model.extra = {"seen": [torch.arange(1000)]}
    save_state(tmp_path / "run.pt", model)
    model.extra = None
    load_state(tmp_path / "run.pt", model)
    overwrite(tmp_path / "run.pt")
    assert torch.equal(model.extra["seen"][0], torch.arange(1000))


@pytest.mark.parametrize("name", FORMATS)
def test_there_are_never_two_sets_of_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def layers() -> tuple[nn.Module, optim.Optimizer]:
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
        optimizer = optim.Adam(model.parameters())
        model(torch.ones(1, 256)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return model, optimizer

    save_state(tmp_path / name, *layers())
    model, optimizer = layers()
    before = [weakref.ref(value) for value in states(optimizer)]
    plain, left = Tensor.clone, []

    def cloned(tensor: Tensor) -> Tensor:
        left.append(sum(value() is not None for value in before))
        return plain(tensor)

    monkeypatch.setattr(Tensor, "clone", cloned)
    load_state(tmp_path / name, model, optimizer)
    assert left == [0] * len(before)  # each is copied once, and what was there before is gone by then


@pytest.mark.parametrize("name", FORMATS)
def test_states_beyond_the_budget_of_a_compiled_model_go_to_disk_at_once(tmp_path: Path, name: str) -> None:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    optimizer = optim.Adam(model.parameters())
    model(torch.ones(1, 256)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    save_state(tmp_path / name, model, optimizer)
    for budget, far in (2_600_000, True), (10_000_000, False):
        fresh = optim.Adam(model.parameters())
        compiled = memgraph.compile(model, budget, optimizer=fresh)
        _, seen = measure_peak(partial(load_state, tmp_path / name, compiled, fresh))
        assert {buffer_slice_of(value) is not None for value in states(fresh) if value.dim()} == {far}
        assert all(map(torch.equal, states(fresh), states(optimizer)))
        assert seen is not None
        mapped = (tmp_path / name).stat().st_size  # which the allocator reports as well
        assert (seen.peak - mapped < 300_000) == far
