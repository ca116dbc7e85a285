"""Trainings on several ranks: tied and unused parameters, accumulation, two optimizers, going back."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel

import memgraph
from tests.support.ranks import on_ranks


class Tied(nn.Module):
    """One weight at both ends, and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.inner, self.end = nn.Embedding(13, 8), nn.Linear(8, 8), nn.Linear(8, 13, bias=False)
        self.end.weight = self.words.weight
        self.unused, self.norm = nn.Parameter(torch.ones(5)), nn.LayerNorm(8)

    def forward(self, words: Tensor) -> Tensor:
        return self.end(self.norm(torch.tanh(self.inner(self.words(words)))))


def words(step: int) -> Tensor:
    return torch.randint(13, (4, 6), generator=torch.Generator().manual_seed(step))


def loss(module: nn.Module, x: Tensor) -> Tensor:
    return nn.functional.cross_entropy(module(x).flatten(0, -2), x.roll(1, 1).flatten())


def equal(one: nn.Module, other: nn.Module) -> bool:
    return all(map(torch.equal, one.parameters(), other.parameters()))


def _tied(rank: int) -> None:
    ours, plain = Tied(), Tied()
    sharded, alone = memgraph.OSS(ours.parameters(), gradients="same"), optim.AdamW(plain.parameters())
    for step in range(3):
        for module, optimizer in ((ours, sharded), (plain, alone)):
            module.train(step != 1)
            loss(module, words(step)).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=step == 0)
    assert equal(ours, plain)
    assert ours.end.weight is ours.words.weight
    assert sharded.state_dict(all_ranks=True)["state"].keys() == alone.state_dict()["state"].keys()


def _accumulated(rank: int) -> None:
    """Two backwards and a step, beside DistributedDataParallel and the plain optimizer."""
    ours, theirs = Tied(), Tied()
    wrapped = DistributedDataParallel(theirs, find_unused_parameters=True)
    sharded, alone = (
        memgraph.OSS(ours.parameters(), optim.SGD, lr=0.1, momentum=0.9),
        optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9),
    )
    for step in range(3):
        with wrapped.no_sync():
            loss(wrapped, words(10 * step + rank)).backward()
        loss(wrapped, words(100 * step + rank)).backward()
        alone.step()
        alone.zero_grad()
        loss(ours, words(10 * step + rank)).backward()
        loss(ours, words(100 * step + rank)).backward()
        sharded.step()
        sharded.zero_grad()
        for mine, their in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(mine, their)
    assert all(map(torch.equal, _everywhere(ours, 0), ours.parameters()))


def _everywhere(module: nn.Module, rank: int) -> list[Tensor]:
    """The parameters of that rank."""
    found = [parameter.detach().clone() for parameter in module.parameters()]
    for parameter in found:
        torch.distributed.broadcast(parameter, rank)
    return found


def _halves(rank: int) -> None:
    """Each half of a model has an optimizer."""
    ours, theirs = (DistributedDataParallel(nn.Sequential(*_layers())) for _ in range(2))
    a, b = (
        _halved(ours, lambda p: memgraph.OSS(p, optim.Adam, gradients="same", lr=0.01)),
        _halved(theirs, lambda p: optim.Adam(p, lr=0.01)),
    )
    for step in range(3):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
        for module, optimizers in ((ours, a), (theirs, b)):
            module(x).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in reversed(optimizers):
                optimizer.zero_grad()
    assert equal(ours, theirs)


def _layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3)]


def _halved(module: nn.Module, make: Callable[[Any], optim.Optimizer]) -> list[optim.Optimizer]:
    parameters = list(module.parameters())
    return [make(parameters[:2]), make(parameters[2:])]


def _rewound(rank: int) -> None:
    """Two steps, back, and the same two steps."""
    for wire in (None, torch.bfloat16):
        module = Tied()
        optimizer = memgraph.OSS(module.parameters(), optim.Adam, wire_dtype=wire, lr=0.01)
        _train(module, optimizer, rank)
        before = copy.deepcopy(module.state_dict()), optimizer.state_dict(all_ranks=True)
        once = _train(module, optimizer, rank)
        module.load_state_dict(before[0])
        optimizer.load_state_dict(before[1])
        assert not optimizer.state
        assert _train(module, optimizer, rank) == once


def _train(module: nn.Module, optimizer: optim.Optimizer, rank: int) -> list[float]:
    losses = []
    for step in range(2):
        value = loss(module, words(10 * step + rank))
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses


def _left_over(rank: int) -> None:
    """A frozen parameter with a gradient is stepped, as torch does; a gradient with a graph is a gradient."""
    ours, plain = ([nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))] for _ in range(2))
    sharded, alone = memgraph.OSS(ours, optim.SGD, lr=0.1), optim.SGD(plain, lr=0.1)
    for parameters, optimizer in ((ours, sharded), (plain, alone)):
        parameters[0].grad = torch.full((3,), 2.0)
        parameters[0].requires_grad_(False)
        (parameters[1].grad,) = torch.autograd.grad(parameters[1].pow(3).sum(), parameters[1], create_graph=True)
        optimizer.step()
    assert all(map(torch.equal, ours, plain))


def _sparse_norm(rank: int) -> None:
    """The norm of sparse gradients is that of the same ones, dense."""
    norms = []
    for sparse, kind in ((True, optim.SparseAdam), (False, optim.Adam)):
        torch.manual_seed(0)
        module = nn.Embedding(9, 4, sparse=sparse)
        optimizer = memgraph.OSS(module.parameters(), kind)
        module(torch.tensor([rank, rank, 5])).square().sum().backward()
        norms.append(optimizer.clip_grad_norm_(0.1))
        optimizer.step()
    torch.testing.assert_close(*norms)


def _in_one_file(rank: int) -> None:
    """The state of all ranks, in a file of memgraph.save_state."""
    module = Tied()
    optimizer = memgraph.OSS(module.parameters(), optim.Adam, lr=0.01)
    _train(module, optimizer, rank)
    with tempfile.TemporaryDirectory() as folder:
        optimizer.consolidate_state_dict()
        path = Path(folder if rank == 0 else "") / "run.pt"
        if rank == 0:
            memgraph.save_state(path, module, optimizer)
        names: list[Any] = [str(path)]
        torch.distributed.broadcast_object_list(names)
        once = _train(module, optimizer, rank)
        memgraph.load_state(names[0], module, optimizer)
        torch.distributed.barrier()
    assert _train(module, optimizer, rank) == once


def _converted(rank: int) -> None:
    """A model that is converted after its optimizer was made takes the state of one that was trained so."""
    theirs, ours = (Tied() for _ in range(2))
    alone = optim.Adam(theirs.double().parameters(), lr=0.01)
    _train(theirs, alone, 0)
    sharded = memgraph.OSS(ours.parameters(), optim.Adam, lr=0.01)
    ours.double().load_state_dict(theirs.state_dict())
    sharded.load_state_dict(alone.state_dict())
    assert _train(ours, sharded, 0) == _train(theirs, alone, 0)
    assert equal(ours, theirs)


CASES = (_tied, _accumulated, _halves, _rewound, _left_over, _sparse_norm, _in_one_file, _converted)


def _all(rank: int) -> list[str]:
    for case in CASES:
        case(rank)
    return [case.__name__ for case in CASES]


def test_tied_and_unused_parameters_accumulation_two_optimizers_and_going_back() -> None:
    assert on_ranks(2, _all) == [[case.__name__ for case in CASES]] * 2
