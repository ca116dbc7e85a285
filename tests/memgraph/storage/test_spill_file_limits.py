"""An error at a file limit of the process names the limit, and the next call is right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import memgraph
from memgraph import SpillError, StateError
from memgraph.storage.async_copy import Copy
from memgraph.storage.io_threads import write
from memgraph.storage.mapped_storage import MappedBuffer, TensorSpec
from memgraph.storage.spill_file import unnamed_file
from tests.memgraph.oss.checkpoint.test_full_state import refusal
from tests.support.limits import files_left, files_of_at_most
from tests.support.ranks import on_ranks

FORMATS = ["run.pt", "run.safetensors"]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.GELU())))


def loss(out: Tensor) -> Tensor:
    return out.square().mean()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("count", [0, 1])
def test_too_many_open_files_are_told_by_saving_and_loading(tmp_path: Path, name: str, count: int) -> None:
    model = net()
    memgraph.save_state(tmp_path / name, model)
    for call in (memgraph.save_state, memgraph.load_state):
        with (
            files_left(count),
            pytest.raises(StateError, match=r"too many files are open: raise the limit \(ulimit -n"),
        ):
            call(tmp_path / name, model)
        call(tmp_path / name, model)


@pytest.mark.parametrize("count", [0, 1])
def test_a_buffer_without_a_file_is_an_error_of_the_disk(tmp_path: Path, count: int) -> None:
    forms = [TensorSpec((1000,), (1,), torch.float32)]
    with files_left(count), pytest.raises(SpillError, match=r"too many files are open: raise the limit \(ulimit -n"):
        MappedBuffer(forms, tmp_path)
    MappedBuffer(forms, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("count", range(4))
def test_a_first_call_that_finds_too_few_files_works_or_says_so(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMGRAPH_CACHE", "")
    model = net()
    optimizer = optim.Adam(model.parameters())
    called = memgraph.compile(model, 2_600_000, loss=loss, optimizer=optimizer, time_limit=0)
    memgraph.plan(net(), torch.randn(8, 256), budget="1GB", loss=loss)  # torch imports on its way what it needs
    with files_left(count):
        try:
            called(torch.randn(64, 256)).backward()
        except memgraph.MemgraphError as error:
            assert "too many files are open: raise the limit (ulimit -n" in str(error)
    optimizer.zero_grad()
    called(torch.randn(64, 256)).backward()


def test_a_limit_on_the_size_of_files_is_told_as_such(tmp_path: Path) -> None:
    makes: list[Callable[[], Any]] = [lambda: unnamed_file(tmp_path, 1 << 20), lambda: _copied(tmp_path)]
    for make in makes:
        with files_of_at_most(1 << 16), pytest.raises(SpillError, match=r"raise the limit \(ulimit -f") as caught:
            make()
        assert "spill_dir" not in str(caught.value)


def _copied(folder: Path) -> None:
    tensor = torch.zeros(1 << 18)
    copy = Copy(write, (unnamed_file(folder, 4096), 0, tensor.nbytes), tensor, "of a test")
    copy.begin(lambda part: None)
    copy.end()


def _saved(rank: int, path: Path) -> str:
    model = net()
    ours = memgraph.OSS(model.parameters(), optim.Adam)
    with files_of_at_most(1 << 14):
        return refusal(StateError, memgraph.save_sharded, path, model, ours)


def test_a_limit_on_the_size_of_files_is_told_as_such_by_all_ranks(tmp_path: Path) -> None:
    first, second = on_ranks(2, _saved, tmp_path / "run")
    assert first == second
    assert "raise the limit (ulimit -f" in first
