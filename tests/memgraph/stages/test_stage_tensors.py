"""A rank keeps the tensors of its stage only; state dicts of the whole model are loaded and gathered."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

import memgraph
from memgraph import StateError
from tests.support.ranks import on_ranks
from tests.support.staged_models import in_turn, made


class WithExtras(nn.Module):
    """An LSTM, which lists its weights, a parameter that no op reads, and buffers."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.lstm, self.last = nn.Linear(4, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 4)
        self.unread = nn.Parameter(torch.ones(3))
        self.register_buffer("scale", torch.full((4,), 2.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.lstm(self.first(x))[0]) * self.scale


def _trained(model: nn.Module, batch: dict[str, Tensor], make: Any, steps: int) -> dict[str, Tensor]:
    """Return the state of a model after some steps of eager, in two micro-batches."""
    optimizer = make(list(model.parameters()))
    for _ in range(steps):
        model, _ = in_turn(model, batch, 2)
        moved = make(list(model.parameters()))
        moved.load_state_dict(optimizer.state_dict())
        moved.step()
        moved.zero_grad()
        optimizer = moved
    return model.state_dict()


def _training(rank: int, name: str) -> list[Any]:
    make = partial(torch.optim.AdamW, lr=0.1)
    model, batch = made(name, 6)
    expected = _trained(copy.deepcopy(model), batch, make, 3)
    pipe = memgraph.pipeline(model, "1GB", 2, optimizer=make)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe.prepare(**batch)
    for _ in range(3):
        pipe.step(**batch)
        assert pipe.optimizer is not None
        pipe.optimizer.step()
        pipe.optimizer.zero_grad()
    elsewhere = [key for key, value in model.state_dict().items() if value.is_meta]
    whole = pipe.full_state_dict()
    wrong = [key for key, value in whole.items() if not torch.equal(value, expected[key])]
    return [len(elsewhere), sorted(pipe.state_dict()), list(whole) == list(expected) if rank == 0 else whole, wrong]


@pytest.mark.long
@pytest.mark.parametrize("name", ["gpt2", "batch norm", "frozen"])
def test_training_in_stages_ends_in_the_state_of_eager(name: str) -> None:
    first, last = on_ranks(2, _training, name)
    model, _ = made(name, 1)
    assert sorted({*first[1], *last[1]}) == sorted(model.state_dict())
    assert (first[0] > 0, last[0] > 0) == (True, True)
    assert (first[2:], last[2:]) == ([True, []], [{}, []])


def _kept(rank: int) -> list[str]:
    """Return the entries of a gathered state that a later step has changed."""
    model, batch = made("tied", 4)
    pipe = memgraph.pipeline(model, "1GB", 2, optimizer=torch.optim.AdamW)
    pipe.prepare(**batch)
    state = pipe.full_state_dict()
    before = {key: value.clone() for key, value in state.items()}
    pipe.step(**batch)
    assert pipe.optimizer is not None
    pipe.optimizer.step()
    return [key for key, value in state.items() if not torch.equal(value, before[key])]


@pytest.mark.long
def test_a_gathered_state_stays_as_it_was() -> None:
    assert on_ranks(2, _kept) == [[], []]


def _loaded(rank: int) -> list[Any]:
    torch.manual_seed(0)
    plain, x, y = WithExtras(), torch.randn(6, 3, 4), torch.randn(6, 3, 4)
    F.mse_loss(plain(x), y).backward()
    with torch.device("meta"):
        model = WithExtras()
    pipe = memgraph.pipeline(model, "1GB", 1, loss=lambda result, target: F.mse_loss(result, target))
    pipe.prepare(x, target=y)
    with pytest.warns(RuntimeWarning, match="have no values yet"):
        pipe.step(x, target=y)
    with pytest.raises(StateError, match=r"has no .*which this rank's stage has"):
        pipe.load_state_dict({})
    with pytest.raises(StateError, match="in the state dict"):
        pipe.load_state_dict({key: torch.ones(2) for key in plain.state_dict()})
    pipe.load_state_dict(plain.state_dict())
    if not model.scale.is_meta:
        model.scale.copy_(plain.scale)
    for parameter in pipe.parameters():
        parameter.grad = None
    pipe.step(x, target=y)
    wanted = dict(plain.named_parameters())
    known = {id(value): key for key, value in model.named_parameters()}
    wrong = [known[id(p)] for p in pipe.parameters() if not p.grad.equal(wanted[known[id(p)]].grad)]  # type: ignore[union-attr, arg-type]
    whole = pipe.full_state_dict()
    return [
        len(list(pipe.parameters())),
        wrong,
        [key for key, value in whole.items() if not value.equal(plain.state_dict()[key])],
    ]


def test_a_model_on_the_meta_device_is_loaded_in_parts() -> None:
    first, last = on_ranks(2, _loaded)
    assert (first[0] > 0, last[0] > 0) == (True, True)
    assert (first[1:], last[1:]) == ([[], []], [[], []])


def _from_files(rank: int, name: str, folder: Path) -> list[str]:
    """Return the entries of this rank that differ from those of the files, and what is wrong with other files."""
    model, batch = made(name, 4)
    wanted = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.device("meta"):
        empty, _ = made(name, 4)
    pipe = memgraph.pipeline(empty, "1GB", 2)
    pipe.prepare(**batch)
    first, second = folder / "1.safetensors", folder / "2.safetensors"
    for paths, words in (([first], "has no"), ([first, first], "in a file before"), (folder / "3", "can't be read")):
        with pytest.raises(StateError, match=words):
            pipe.load_safetensors(paths)
    pipe.load_safetensors([first, second])
    return [key for key, value in pipe.state_dict().items() if not torch.equal(value, wanted[key])]


@pytest.mark.long
@pytest.mark.parametrize("name", ["gpt2", "tied", "batch norm"])
def test_each_rank_reads_its_part_of_safetensors_files(name: str, tmp_path: Path) -> None:
    model, _ = made(name, 4)
    known = {tensor.data_ptr(): key for key, tensor in reversed(model.state_dict().items()) if tensor.numel()}
    keys = [key for key, tensor in model.state_dict().items() if known.get(tensor.data_ptr()) == key]
    for i, part in enumerate((keys[::2], keys[1::2])):
        save_file({key: model.state_dict()[key].contiguous() for key in part}, tmp_path / f"{i + 1}.safetensors")
    assert on_ranks(2, _from_files, name, tmp_path) == [[]] * 2


def _referred(rank: int) -> list[str]:
    model, batch = made("gpt2", 4)
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        memgraph.pipeline(model, "1GB", 2).prepare(**batch)
    assert early is not None
    return [str(each.message) for each in caught]


def test_an_optimizer_made_too_early_is_said() -> None:
    for texts in on_ranks(2, _referred):
        assert any("of pipe.parameters() after prepare()" in text for text in texts)


def test_a_refused_plan_leaves_a_model_on_the_meta_device() -> None:
    model, batch = made("skips", 8)
    model = model.to("meta")
    with pytest.raises(memgraph.StagesBudgetError) as caught:
        memgraph.pipeline(model, "1KB", 2).prepare(**batch)
    assert all(each.is_meta for each in model.parameters())
    pipe = memgraph.pipeline(model, caught.value.smallest, 2)
    with pytest.warns(RuntimeWarning, match="have no values"):
        pipe.step(**batch)


def test_a_state_is_loaded_and_read_before_the_first_step() -> None:
    model, batch = made("skips", 8)
    saved = {key: value + 1 for key, value in model.state_dict().items()}
    pipe = memgraph.pipeline(model, "1GB", 2)
    pipe.load_state_dict(saved)
    for state in (pipe.state_dict(), pipe.full_state_dict(), model.state_dict()):
        assert list(state) == list(saved) and all(state[key].equal(value) for key, value in saved.items())
    pipe.step(**batch)
    on_meta = memgraph.pipeline(made("skips", 8)[0].to("meta"), "1GB", 2)
    for call in (on_meta.full_state_dict, lambda: on_meta.load_state_dict(saved)):
        with pytest.raises(memgraph.MemgraphError, match=r"prepare\(\)"):
            call()
