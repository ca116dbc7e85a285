"""A file that can't be written or read is told in words of its own, with what to do."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memgraph
from memgraph import StateError
from memgraph.api.training_state import load_state, save_state
from tests.memgraph.oss.checkpoint.test_full_state import refusal
from tests.support.ranks import on_ranks

BOTH = pytest.mark.parametrize("call", [save_state, load_state])


@BOTH
def test_a_name_that_is_too_long_is_told(tmp_path: Path, call: Callable[..., None]) -> None:
    with pytest.raises(StateError, match="File name too long; give a"):
        call(tmp_path / ("x" * 300 + ".pt"), nn.Linear(2, 2))


@BOTH
def test_a_name_that_no_file_can_have_is_told(call: Callable[..., None]) -> None:
    with pytest.raises(ValueError, match=r"path='a\\x00b'; give the name of a file"):
        call("a\0b", nn.Linear(2, 2))


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"there is no folder .*none: make it, or name another"):
        save_state(tmp_path / "none" / "run.pt", nn.Linear(2, 2))
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match="file is no folder"):
        save_state(tmp_path / "file" / "run.pt", nn.Linear(2, 2))


@BOTH
def test_a_folder_in_the_place_of_a_file_is_told(tmp_path: Path, call: Callable[..., None]) -> None:
    with pytest.raises(StateError, match="is a folder, and has to be a regular file"):
        call(tmp_path, nn.Linear(2, 2))


def empty(path: Path) -> None:
    path.write_bytes(b"")


def text(path: Path) -> None:
    path.write_bytes(b"a word or two, and no archive")


def pickled(path: Path) -> None:
    torch.save(nn.Linear(2, 2), path)


@pytest.mark.parametrize(
    "make, words",
    [
        (empty, "it is empty; give"),
        (text, "it is no archive of torch.save; give"),
        (pickled, "it has a pickled torch.nn.modules.linear.Linear in it, and only tensors"),
    ],
)
def test_a_file_of_something_else_is_told_without_other_ways_to_load_it(tmp_path: Path, make: Any, words: str) -> None:
    make(tmp_path / "run.pt")
    with pytest.raises(StateError, match=words) as caught:
        load_state(tmp_path / "run.pt", nn.Linear(2, 2))
    assert "\x1b" not in str(caught.value) and "weights_only" not in str(caught.value)
    assert len(str(caught.value)) < 300


def _sharded(rank: int, path: str) -> None:
    model = nn.Linear(2, 2)
    given = path, model, memgraph.OSS(model.parameters())
    assert f"{path} is no folder; give a folder of save_sharded" in refusal(StateError, memgraph.load_sharded, *given)
    assert f"{path} is no folder, so it is not replaced" in refusal(StateError, memgraph.save_sharded, *given)


def test_a_file_in_the_place_of_a_folder_is_told() -> None:
    with tempfile.NamedTemporaryFile() as file:
        on_ranks(1, _sharded, file.name)
