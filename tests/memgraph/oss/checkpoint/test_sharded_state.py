"""Sharded checkpoints are read by plain torch, and go on on any number of ranks."""

from __future__ import annotations

import errno
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

import memgraph
from memgraph import StateError
from memgraph.oss.checkpoint import checkpoint_folder
from memgraph.oss.comm import watchdog
from tests.memgraph.oss.checkpoint.test_full_state import refusal, same
from tests.support.ranks import on_ranks

SLOW = pytest.mark.slow
KINDS: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "Adam": (optim.Adam, {"amsgrad": True}),
    "SGD": (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "Adafactor": (optim.Adafactor, {}),
    "LBFGS": (optim.LBFGS, {"max_iter": 2}),
}


class Shapes(nn.Module):
    """Parameters that lie in memory in several ways: rows, channels_last, transposed, one row, one number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 5, 3)
        self.first.weight.data = self.first.weight.data.to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(7, 5).t())
        self.row = nn.Parameter(torch.randn(1, 7))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.first(x).mean((2, 3)) @ self.turned * self.row) * self.scale


def rows() -> nn.Module:
    """LBFGS takes no others."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 5), nn.Dropout(0.5))


def trained(name: str, steps: int, sharded: bool = True) -> tuple[nn.Module, Any]:
    kind, options = KINDS[name]
    module = rows() if name == "LBFGS" else Shapes()
    make: Any = memgraph.OSS if sharded else lambda parameters, kind, gradients, **given: kind(parameters, **given)
    optimizer = make(module.parameters(), kind, gradients="same", **options)
    train(module, optimizer, steps)
    return module, optimizer


def train(module: nn.Module, optimizer: Any, steps: int) -> list[Tensor]:
    for _ in range(steps):
        x = torch.randn(2, 3, 4, 4)

        def closure(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss = module(x).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    return [parameter.detach().clone() for parameter in module.parameters()]


def _saved(rank: int, path: Path) -> None:
    for name in KINDS:
        module, ours = trained(name, 2)
        memgraph.save_sharded(path / name, module, ours)
        train(module, ours, 1)
        memgraph.save_sharded(path / name, module, ours)  # takes the place of the first


def _loaded(rank: int, path: Path) -> list[str]:
    wrong = []
    for name in KINDS:
        wanted_module, wanted = trained(name, 3, sharded=False)
        expected = train(wanted_module, wanted, 2)
        module, ours = trained(name, 1)  # what there is goes
        memgraph.load_sharded(path / name, module, ours)
        if rank > 1:
            torch.manual_seed(0)  # two ranks were saved
            trained(name, 3, sharded=False)
        found = train(module, ours, 2)
        wrong += [] if all(map(torch.equal, found, expected)) else [f"{name} went on otherwise"]
        state = ordered(ours.state_dict(all_ranks=True))
        wrong += [] if same(state, ordered(wanted.state_dict())) else [f"{name} has another state"]
    return wrong


def ordered(value: Any) -> Any:
    """The same by name: a checkpoint of torch.distributed does not keep the order of a dict."""
    if isinstance(value, dict):
        return {name: ordered(value[name]) for name in sorted(value)}
    return list(map(ordered, value)) if isinstance(value, list) else value


@pytest.mark.long
def test_saved_on_two_ranks_and_loaded_on_others(tmp_path: Path) -> None:
    on_ranks(2, _saved, tmp_path)
    for ranks in (1, 3, 4):
        assert on_ranks(ranks, _loaded, tmp_path) == [[]] * ranks
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(KINDS)
    _plain_torch_reads(tmp_path)


def _plain_torch_reads(path: Path) -> None:
    for name in ("Adam", "SGD", "Adafactor"):  # torch itself does not find numbers that are no tensors again
        _, wanted = trained(name, 3, sharded=False)
        module, plain = trained(name, 1, sharded=False)
        state = {"model": module.state_dict(), "optimizer": plain.state_dict()}
        for entries in state["optimizer"]["state"].values():
            for value in entries.values():
                value.zero_()
        with warnings.catch_warnings(action="ignore"):
            load(state, checkpoint_id=path / name, no_dist=True)
        plain.load_state_dict(state["optimizer"])
        assert same(plain.state_dict(), wanted.state_dict())


def _in_rows(rank: int, path: Path) -> list[str]:
    """A caller saves and loads by himself, on ranks 0 and 2 of 3."""
    group = dist.new_group([0, 2])
    if not isinstance(group, dist.ProcessGroup):
        return []
    module = Shapes()
    ours = memgraph.OSS(module.parameters(), optim.Adam, group, gradients="same")
    train(module, ours, 2)
    state = ours.sharded_state_dict()
    wanted = ours.state_dict(all_ranks=True)
    found = [f"{item} {type(entries['exp_avg']).__name__}" for item, entries in state["state"].items()]
    found += [
        str(entries["exp_avg"].to_local().shape)
        for entries in state["state"].values()
        if isinstance(entries["exp_avg"], DTensor)
    ]
    save({"optimizer": state}, checkpoint_id=path, process_group=group)
    train(module, ours, 1)
    room = {"optimizer": ours.sharded_state_dict()}
    load(room, checkpoint_id=path, process_group=group)
    ours.load_sharded_state_dict(room["optimizer"])
    assert same(ordered(ours.state_dict(all_ranks=True)), ordered(wanted))
    return found


def test_a_sharded_state_dict_has_rows_of_each_tensor(tmp_path: Path) -> None:
    first, none, second = on_ranks(3, _in_rows, tmp_path / "saved")
    assert none == []
    shapes = ["[5, 4]", "[1, 4]", "[3, 3, 3, 3]", "[3]"], ["[5, 3]", "[1, 3]", "[2, 3, 3, 3]", "[2]"]
    for found, wanted in zip((first, second), shapes, strict=True):
        assert [each for each in found if "Size" in each] == [f"torch.Size({shape})" for shape in wanted]


def _refused(rank: int, path: Path) -> list[str]:
    module, ours = trained("Adam", 2)
    memgraph.save_sharded(path / "saved", module, ours)
    before, values = ours.state_dict(all_ranks=True), [p.detach().clone() for p in module.parameters()]
    other = nn.Linear(3, 4)
    sgd = memgraph.OSS(module.parameters(), optim.SGD, lr=0.1)
    several = memgraph.OSS([{"params": [p]} for p in module.parameters()], optim.Adam)
    (path / "files").mkdir(exist_ok=True)
    (path / "files" / "kept").write_text("")
    messages = [
        refusal(StateError, memgraph.load_sharded, path / "none", module, ours),
        refusal(StateError, memgraph.load_sharded, path / "saved", other, ours),
        refusal(StateError, memgraph.load_sharded, path / "saved", module, sgd),
        refusal(StateError, memgraph.load_sharded, path / "saved", module, several),
        refusal(StateError, memgraph.save_sharded, path / "files", module, ours),
    ]
    FileSystemWriter.write_data = _full if rank == 1 else FileSystemWriter.write_data  # type: ignore[assignment, method-assign]
    messages.append(refusal(StateError, memgraph.save_sharded, path / "saved", module, ours))
    memgraph.load_sharded(path / "saved", module, ours)
    assert sorted(os.listdir(path)) == ["files", "saved"]
    if rank == 0:
        for part in (path / "saved").glob("*.distcp"):
            os.truncate(part, 100)
    dist.barrier()
    messages.append(refusal(StateError, memgraph.load_sharded, path / "saved", module, ours))
    assert same(ordered(before), ordered(ours.state_dict(all_ranks=True)))
    assert all(map(torch.equal, values, module.parameters()))
    return [text.replace(str(path), "") for text in messages]


def _full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_folder_that_is_of_another_training_is_refused_on_all_ranks(tmp_path: Path) -> None:
    first, second = on_ranks(2, _refused, tmp_path)
    assert first == second
    assert (
        first[0]
        == "the loading of /none has failed on rank 0: there is no checkpoint in /none; give a folder of save_sharded"
    )
    assert "it is of another model: 'bias' is only in one of them; nothing was changed" in first[1]
    assert "it is Adam's, and SGD was given; make the same optimizer; nothing was changed" in first[2]
    assert "it has 1 group, and the optimizer has 5" in first[3]
    assert "/files is there and is no checkpoint, so it is not replaced: name another folder" in first[4]
    assert first[5].startswith("the saving of /saved has failed on rank 0: [Errno 28] No space left on device")
    assert "the loading of /saved has failed on rank 0: " in first[6]


def _interrupted(rank: int, path: Path, victim: int, where: str) -> str:
    watchdog.SILENCE = 2.4  # seconds of silence; a connection that is closed is heard at once
    module, ours = trained("Adam", 1)
    if not path.exists():
        memgraph.save_sharded(path, module, ours)
    train(module, ours, 1)
    if rank == victim:
        _kill_in(where)
    with pytest.raises(memgraph.CollectiveError) as caught:
        memgraph.save_sharded(path, module, ours)
    return f"{caught.value.collective} {caught.value.ranks}"


def _kill_in(where: str) -> None:
    """Let this process die in the middle of a function."""

    def die(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(FileSystemWriter if hasattr(FileSystemWriter, where) else checkpoint_folder, where, die)


@pytest.mark.long
@pytest.mark.parametrize(
    "victim, where",
    [pytest.param(1, "write_data", marks=SLOW), pytest.param(0, "finish", marks=SLOW), (0, "_exchange_names")],
)
def test_a_save_that_is_interrupted_leaves_the_one_before(victim: int, where: str, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    found = on_ranks(2, _interrupted, path, victim, where, lost=[victim])
    assert found[1 - victim] == f"saving of {path} ({victim},)"
    assert on_ranks(1, _first, path) == [[]]
    assert on_ranks(2, _again, path) == [None, None]
    assert [each.name for each in tmp_path.iterdir()] == ["saved"]


def _first(rank: int, path: Path) -> list[str]:
    module, ours = trained("Adam", 2)
    memgraph.load_sharded(path, module, ours)
    _, wanted = trained("Adam", 1)
    return [] if same(ordered(ours.state_dict()), ordered(wanted.state_dict())) else ["another state"]


def _again(rank: int, path: Path) -> None:
    memgraph.save_sharded(path, *trained("Adam", 1))
