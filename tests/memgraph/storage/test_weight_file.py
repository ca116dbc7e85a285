"""Frozen weights that the caller has mapped from a file stay there, as long as the file has what they are."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn, optim

import memgraph
from memgraph.storage.mapped_storage import buffer_slice_of, open_mappings
from memgraph.storage.spill_file import SpillError, is_ram
from memgraph.storage.transfer import reload_slices, wait_all
from memgraph.storage.weight_file import WeightFile, WeightFiles

WIDTH, LAYERS = 384, 6
X = torch.linspace(-1, 1, 8 * WIDTH).view(8, WIDTH)


def chain() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)), nn.Linear(WIDTH, 4))


@pytest.fixture(name="path")
def _path() -> Iterator[Path]:
    """A file on a disk; its weights begin within a page, and the last ends within one."""
    folder = Path("/var/tmp" if is_ram(Path("/tmp")) else "/tmp") / f"weights-{os.getpid()}"
    folder.mkdir()
    torch.manual_seed(0)
    save_file(chain().state_dict(), folder / "model.safetensors")
    yield folder / "model.safetensors"
    shutil.rmtree(folder)


def loaded(path: Path, load: Callable[[Path], Any] = load_file) -> Any:
    with torch.device("meta"):
        module = chain()
    module.load_state_dict(load(path), assign=True)
    module.requires_grad_(False)
    module[-1].requires_grad_(True)
    return module


class Training:
    """A module whose head is trained within a budget, and a plain one."""

    def __init__(self, path: Path, load: Callable[[Path], Any] = load_file) -> None:
        self.ours: Any = loaded(path, load)
        self.plain: Any = loaded(path)
        self.optimizers = [optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (self.ours, self.plain)]
        budget = WIDTH * WIDTH * 4 * 3
        self.model: Any = memgraph.compile(
            self.ours, budget, loss=torch.sum, optimizer=self.optimizers[0], time_limit=0
        )

    def step(self) -> None:
        for model, optimizer in zip((self.model, self.plain), self.optimizers, strict=True):
            result = model(X)
            (result if model is self.model else result.sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert self.are_equal

    @property
    def are_equal(self) -> bool:
        return all(map(torch.equal, self.ours.parameters(), self.plain.parameters()))

    @property
    def kept(self) -> list[bool]:
        """For each weight, if it stays in the file; those that are on no tier are left out."""
        places = [buffer_slice_of(each.weight.detach()) for each in self.ours]
        return [isinstance(place.mapping, WeightFile) for place in places if place]


def mapped_by_torch(path: Path) -> Any:
    torch.save(load_file(path), path.with_suffix(".pt"))
    return torch.load(path.with_suffix(".pt"), mmap=True, weights_only=True)


@pytest.mark.parametrize("load", [load_file, mapped_by_torch])
def test_frozen_weights_stay_in_the_file_of_the_caller(path: Path, load: Callable[[Path], Any]) -> None:
    training = Training(path, load)
    for _ in range(3):
        training.step()
    assert len(training.kept) >= LAYERS - 2 and all(training.kept)


def test_a_weight_that_is_written_is_moved(path: Path) -> None:
    training = Training(path)
    training.step()
    count = len(training.kept)
    with torch.no_grad():
        for module in (training.ours, training.plain):
            module[1].weight[5, 7] += 1.0
            module[2].weight.data.view(-1)[-1] = 3.0  # in a page that it shares with a neighbour
    for _ in range(2):
        training.step()
    assert training.kept.count(False) == 2 and len(training.kept) == count
    assert all(map(torch.equal, load_file(path).values(), chain_values(path)))


def test_all_weights_of_a_file_that_are_written_are_moved(path: Path) -> None:
    """A file that has lost all of its weights is no place any more."""
    training = Training(path)
    training.step()
    with torch.no_grad():
        for module in (training.ours, training.plain):
            for layer in module[:-1]:
                layer.weight += 0.1
    for _ in range(2):
        training.step()
    assert training.kept and not any(training.kept)


def test_two_modules_have_weights_of_one_file(path: Path) -> None:
    weights = load_file(path)
    some, others = dict(list(weights.items())[:4]), dict(list(weights.items())[4:])
    first, second = WeightFiles(), WeightFiles()
    first.keep(some)
    second.keep(others)
    assert all(isinstance(place_of(each), WeightFile) for each in weights.values())
    second.keep({})
    assert all(isinstance(place_of(each), WeightFile) for each in some.values()) and first.are_whole
    assert not any(map(place_of, others.values()))


def chain_values(path: Path) -> list[Tensor]:
    torch.manual_seed(0)
    expected = chain().state_dict()
    return [expected[name] for name in load_file(path)]


def test_one_that_is_trained_from_now_on_is_moved(path: Path) -> None:
    training = Training(path)
    training.step()
    for module in (training.ours, training.plain):
        module[3].requires_grad_(True)
    for _ in range(2):
        training.step()
    assert not isinstance(place_of(training.ours[3].weight), WeightFile)
    assert any(training.kept)


def place_of(tensor: Tensor) -> object:
    place = buffer_slice_of(tensor.detach())
    return place and place.mapping


def test_one_that_the_optimizer_writes_by_a_gradient_of_the_caller_is_moved(path: Path) -> None:
    training = Training(path)
    training.step()
    for module, optimizer in zip((training.ours, training.plain), training.optimizers, strict=True):
        module[2].weight.grad = torch.ones(WIDTH, WIDTH)
        optimizer.step()
        module[2].weight.grad = None
    assert training.are_equal
    training.step()
    assert training.kept.count(False) == 1


def test_a_file_that_is_written_is_refused_by_its_name(path: Path) -> None:
    training = Training(path)
    training.step()
    with path.open("r+b") as file:
        file.seek(5000)
        file.write(b"1234")
    os.utime(path, ns=(1, 1))
    with pytest.raises(SpillError, match=r"model.safetensors was written since its weights were mapped"):
        training.model(X)


def test_a_file_that_is_gone_is_no_place(path: Path) -> None:
    training = Training(path)
    path.unlink()
    training.step()
    assert training.kept and not any(training.kept)


def test_any_range_is_read(path: Path) -> None:
    """Weights begin at no page, and the last one ends where the file does."""
    weights = load_file(path)
    files = WeightFiles()
    assert files.keep(weights) == set(weights)
    for tensor in weights.values():
        place, read = buffer_slice_of(tensor), torch.empty_like(tensor)
        assert place is not None
        wait_all([reload_slices(place, read)])
        assert torch.equal(read, tensor)
    (base,) = {file.begin for file, _ in files.kept}
    assert files.are_whole and base in open_mappings
    del files, place
    assert base not in open_mappings


def test_what_a_neighbour_has_written_does_not_count(path: Path) -> None:
    weights = dict(sorted(load_file(path).items(), key=lambda item: item[1].data_ptr()))
    first, second = list(weights)[2:4]
    files = WeightFiles()
    files.keep({first: weights[first]})
    weights[second].view(-1)[0] += 1.0
    assert files.are_whole
    assert files.keep(weights) == set(weights) - {second}
    weights[first].view(-1)[-1] += 1.0
    assert not files.are_whole
