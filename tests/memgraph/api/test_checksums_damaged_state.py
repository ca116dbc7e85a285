"""A file with a flipped bit is refused, or loads the same state."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn, optim

from memgraph import StateError
from memgraph.api.training_state import load_state, save_state

FORMATS = ["run.pt", "run.safetensors"]


def trained() -> tuple[nn.Module, optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 2))
    optimizer = optim.Adam(model.parameters())
    model(torch.randn(4, 16)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def all_of(model: nn.Module, optimizer: optim.Optimizer) -> list[Any]:
    states = [value for state in optimizer.state_dict()["state"].values() for value in state.values()]
    groups = [{**group, "params": None} for group in optimizer.param_groups]
    return [*model.state_dict().values(), *states, torch.get_rng_state(), groups]


def same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else one == other


@pytest.mark.long
@pytest.mark.parametrize("name", FORMATS)
def test_no_flipped_bit_is_loaded(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    trained_ = trained()
    save_state(path, *trained_)
    wanted, whole = all_of(*trained_), path.read_bytes()
    draw, refused = random.Random(0), 0
    places = [draw.randrange(8 * len(whole)) for _ in range(150)]
    for place in places:
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        model, optimizer = trained()
        before = all_of(model, optimizer)
        try:
            load_state(path, model, optimizer)
        except StateError:
            refused += 1
            assert all(map(same, all_of(model, optimizer), before))
        else:
            assert all(map(same, all_of(model, optimizer), wanted))  # it was in what fills the room between tensors
    assert refused > len(places) / 2


@pytest.mark.parametrize("name", FORMATS)
def test_the_tensor_is_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    model, optimizer = trained()
    nn.init.constant_(model.get_parameter("2.weight"), 1.2345)
    save_state(path, model, optimizer)
    at = path.read_bytes().index(torch.full((8,), 1.2345).numpy().tobytes())
    flip(path, at + 70)
    said = r"is damaged: '(model\.)?2\.weight' was damaged since it was written; continue from an earlier one"
    with pytest.raises(StateError, match=said):
        load_state(path, model, optimizer)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_file_of_before_there_were_checksums_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    model, optimizer = trained()
    save_state(path, model, optimizer)
    with safe_open(path, framework="pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.offset_keys()}
    del metadata["memgraph.digests"]
    save_file(tensors, path, metadata)
    load_state(path, *trained())


def test_a_large_file_is_compared_in_parts(tmp_path: Path) -> None:
    model = nn.Linear(1024, 1024)
    save_state(tmp_path / "run.pt", model)
    flip(tmp_path / "run.pt", 3 << 20)
    with pytest.raises(StateError, match=r"'model\.weight' was damaged"):
        load_state(tmp_path / "run.pt", model)
