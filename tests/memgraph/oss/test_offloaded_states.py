"""States of shards live on disk where a budget wants it: training is the plain one's, and each rank keeps to its budget.

All of one kind is tried in one start of some ranks: what is returned is what went wrong.
"""

from __future__ import annotations

import copy
import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import memgraph
from memgraph.errors import AgreementError, BudgetError, ShardError
from memgraph.optim import offloaded_update
from memgraph.oss.compiled.step_memory import movable_shard_states
from memgraph.storage.mapped_storage import is_offloaded
from memgraph.storage.spill_file import SpillError
from passes import Stream
from tests.memgraph.oss.checkpoint.test_full_state import same
from tests.memgraph.oss.checkpoint.test_sharded_state import ordered
from tests.support.faults import failing
from tests.support.ranks import on_ranks

KINDS: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (optim.AdamW, {"lr": 0.01}),
    "Adam": (optim.Adam, {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}),
    "momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "fused": (optim.AdamW, {"lr": 0.01, "fused": True}),
    "Adagrad": (optim.Adagrad, {"lr": 0.01}),  # has states before its first step
}
QUICK = "AdamW", "momentum", "Adagrad"
ROOM = 1 << 30
WIDTH, LAYERS = 256, 4
BYTES = WIDTH * WIDTH * 4  # of a bucket: each weight has one


class Chain(nn.Module):
    """Weights that are worth a copy, cut over three ranks as well; biases that are not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


def batches() -> Callable[[], Tensor]:
    generator = torch.Generator().manual_seed(1)
    return lambda: torch.randn(8, WIDTH, generator=generator)


def train(model: Any, optimizer: Any, batch: Callable[[], Tensor], steps: int = 1) -> None:
    for _ in range(steps):
        model(batch()).backward()
        optimizer.step()
        optimizer.zero_grad()


def made(kind: str, sharded: bool = True, messages: bool = False, **settings: Any) -> tuple[Chain, Any]:
    """`messages`: ranks send what they could read of each other's memory."""
    cls, options = KINDS[kind]
    module = Chain()
    parameters = list(module.parameters())[: settings.pop("count", None)]
    if not sharded:
        return module, cls(parameters, **options)
    ours = memgraph.OSS(parameters, cls, bucket_bytes=BYTES, **options, **settings)
    ours.comm.shared_memory = None if messages else ours.comm.shared_memory
    return module, ours


def tight(kind: str, share: float = 0.8, **settings: Any) -> int:
    """A budget that leaves so much of the states no room on the device."""
    module, ours = made(kind, **settings)
    model = memgraph.compile(module, ROOM, optimizer=ours, time_limit=0.0)
    model(batches()())
    return int(model.plan.peak - share * sum(movable_shard_states(ours).values()))


def compiled(kind: str, budget: int | None = None, **settings: Any) -> tuple[Any, Any]:
    offloaded_update.SMALLEST = 1 << 16  # several windows for each piece
    module, ours = made(kind, **settings)
    return memgraph.compile(module, budget or tight(kind, **settings), optimizer=ours, time_limit=0.0), ours


def begun_again(model: Any, ours: Any) -> tuple[Any, Any]:
    """The same, with parameters as new and without a state; what was planned is kept."""
    ours.zero_grad()
    ours.inner.state.clear()
    model.load_state_dict(Chain().state_dict())
    return model, ours


def are_offloaded(optimizer: Any) -> list[bool]:
    """Return for each state of this rank with elements True if it is offloaded."""
    states = (value for state in optimizer.inner.state.values() for value in state.values())
    return [is_offloaded(value) for value in states if isinstance(value, Tensor) and value.numel() > 1]


def in_home(tensor: Tensor) -> bool:
    """Return True if a tensor's memory is mapped from a file."""
    files = [line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if " /" in line]
    ranges = [[int(end, 16) for end in each.split("-")] for each in files]
    return any(begin <= tensor.data_ptr() < end for begin, end in ranges)


def alike(model: nn.Module, plain: nn.Module) -> bool:
    return all(map(torch.equal, model.parameters(), plain.parameters()))


def is_kept(model: Any) -> bool:
    report = model.plan
    return report.measured is not None and report.measured <= report.peak <= report.budget


def _trainings(rank: int, kinds: tuple[str, ...]) -> tuple[list[str], list[str]]:
    wrong, plans = [], []
    for kind in kinds:
        (plain, theirs), (model, ours) = made(kind, sharded=False), compiled(kind)
        for batch, of, optimizer in ((batches(), plain, theirs), (batches(), model, ours)):
            train(of, optimizer, batch, 3)
        plans += [str(model.plan.forecast.trace)]
        streamed = [decision for decision in model.plan.plan if isinstance(decision, Stream)]
        wrong += [f"{kind} is another"] * (not alike(model, plain))
        wrong += [f"{kind} {model.plan}"] * (not is_kept(model) or not streamed)
        wrong += [f"{kind} {are_offloaded(ours)}"] * (not any(are_offloaded(ours)))
        wrong += [f"{kind} has another state"] * (not same(ours.state_dict(all_ranks=True), theirs.state_dict()))
    module, ours = made("AdamW")
    with pytest.raises(BudgetError):
        memgraph.compile(module, tight("AdamW"), optimizer=ours, time_limit=0.0, offload=None)(batches()())
    return wrong, plans


@pytest.mark.long
def test_trainings_with_offloaded_states_are_the_plain_ones_and_keep_to_their_budgets_with_one_plan() -> None:
    (wrong, plans), (others, theirs) = on_ranks(2, _trainings, QUICK)
    assert wrong == others == []
    assert plans == theirs


@pytest.mark.slow
def test_trainings_of_other_kinds_and_on_one_rank_are_the_plain_ones() -> None:
    assert on_ranks(1, _trainings, tuple(KINDS))[0][0] == []
    assert [wrong for wrong, _ in on_ranks(2, _trainings, tuple(sorted(KINDS.keys() - QUICK)))] == [[]] * 2


def _loops(rank: int) -> list[str]:
    """Run common loops over an optimizer, its states and its groups."""

    def clipped(model: Any, optimizer: Any, batch: Any) -> None:
        for _ in range(2):
            model(batch()).backward()
            if optimizer is ours:
                ours.clip_grad_norm_(1e9)
            else:
                nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            optimizer.step()
            optimizer.zero_grad()

    def summed(model: Any, optimizer: Any, batch: Any) -> None:
        for _ in range(2):
            model(batch()).backward()
            train(model, optimizer, batch)

    def loaded(model: Any, optimizer: Any, batch: Any) -> None:
        train(model, optimizer, batch)
        if optimizer is not ours:
            before.update(copy.deepcopy(optimizer.state_dict()))
        train(model, optimizer, batch)
        optimizer.load_state_dict(copy.deepcopy(before))  # the plain one's
        train(model, optimizer, batch, 2)

    def grown(model: Any, optimizer: Any, batch: Any) -> None:
        train(model, optimizer, batch)
        model.zero_grad()
        optimizer.add_param_group({"params": list(model.parameters())[-2:], "lr": 0.03})
        train(model, optimizer, batch, 2)

    def moved(model: Any, optimizer: Any, batch: Any) -> None:
        train(model, optimizer, batch)
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        train(model, optimizer, batch, 2)

    def frozen(model: Any, optimizer: Any, batch: Any) -> None:
        first = next(iter(model.parameters()))
        train(model, optimizer, batch)
        first.requires_grad_(False)
        train(model, optimizer, batch)
        first.requires_grad_(True)
        train(model, optimizer, batch)

    wrong, before = [], dict[str, Any]()
    once = compiled("AdamW", budget := tight("AdamW", 0.3))
    for loop in (clipped, summed, loaded, moved, frozen, grown):
        count: dict[str, Any] = {"count": -2} if loop is grown else {}
        model, ours = compiled("AdamW", budget, **count) if loop is grown else begun_again(*once)
        plain, theirs = made("AdamW", False, **count)
        loop(plain, theirs, batches())
        loop(model, ours, batches())
        wrong += [loop.__name__] * (not alike(model, plain) or not any(are_offloaded(ours)) or not is_kept(model))
    return wrong


@pytest.mark.long
def test_everyday_loops_are_the_plain_ones() -> None:
    assert on_ranks(2, _loops) == [[]] * 2


def _saved(rank: int, path: Path) -> None:
    model, ours = compiled("AdamW", gradients="same")
    train(model, ours, batches(), 2)
    rows = [entries["exp_avg"].to_local() for entries in ours.sharded_state_dict()["state"].values()]
    assert [in_home(row) for row in rows] == [row.nbytes > 1 << 16 for row in rows]
    with failing("posix_fallocate", errno.ENOSPC, rank == 1):  # then they are copied in memory
        memgraph.save_sharded(path, model, ours)


def _loaded(rank: int, path: Path) -> list[str]:
    (plain, theirs), (model, ours) = made("AdamW", sharded=False), compiled("AdamW", gradients="same")
    batch = batches()
    train(plain, theirs, batch, 2)
    memgraph.load_sharded(path, model, ours)
    for of, optimizer in ((plain, theirs), (model, ours)):
        train(of, optimizer, batches(), 2)
    wrong = ["went on otherwise"] * (not alike(model, plain)) + ["is not offloaded"] * (not any(are_offloaded(ours)))
    state = ordered(ours.state_dict(all_ranks=True))
    return wrong + ["has another state"] * (not same(state, ordered(theirs.state_dict())))


@pytest.mark.long
def test_offloaded_states_are_saved_on_two_ranks_and_loaded_on_others(tmp_path: Path) -> None:
    on_ranks(2, _saved, tmp_path / "run")
    for ranks in (1, 3):
        assert on_ranks(ranks, _loaded, tmp_path / "run") == [[]] * ranks


FAULTS = (("pwritev", errno.EIO, 5), ("preadv", errno.EIO, 9), ("posix_fallocate", errno.ENOSPC, 1))


def _interrupted(rank: int, last: int, messages: bool) -> list[str]:
    """The disk of the last rank fails, in some bucket or other, and the next call goes on."""
    wrong, once = [], compiled("AdamW", messages=messages)
    for name, code, after in FAULTS:
        (plain, theirs), (model, ours) = made("AdamW", sharded=False), begun_again(*once)
        batch, again = batches(), batches()
        before = 0 if name == "posix_fallocate" else 1  # which makes room for new states
        train(plain, theirs, batch, before + 2)
        train(model, ours, again, before)
        model(again()).backward()
        with (
            failing(name, code, rank == last, after),
            pytest.raises(SpillError, match=f"{os.strerror(code)}.* on rank {last}"),
        ):
            ours.step()
        with failing(name, code, rank == last), pytest.raises(SpillError, match=r"call step\(\) again on all ranks"):
            ours.step()
        with pytest.raises(ShardError, match="can be resumed"):
            ours.clip_grad_norm_(1.0)
        with pytest.raises(memgraph.StateError, match="when some parameters were updated"):
            ours.consolidate_state_dict()
        ours.step()
        ours.zero_grad()
        train(model, ours, again)
        state = ours.state_dict(all_ranks=True)
        wrong += [name] * (not alike(model, plain) or not same(state, theirs.state_dict()))
    return wrong


@pytest.mark.long
def test_a_disk_that_fails_on_one_rank_interrupts_the_step_of_all() -> None:
    for ranks, messages in ((1, True), (2, False), (2, True)):
        assert on_ranks(ranks, _interrupted, ranks - 1, messages) == [[]] * ranks


def _given_up(rank: int) -> bool:
    """An interrupted step that is not gone on with: an earlier state has to come, of both."""
    (plain, theirs), (model, ours) = made("AdamW", sharded=False), compiled("AdamW")
    batch = batches()
    train(model, ours, batch)
    before = copy.deepcopy((model.state_dict(), ours.state_dict(all_ranks=True)))
    model(batch()).backward()
    with failing("preadv", errno.EIO, rank == 1, 9), pytest.raises(SpillError):
        ours.step()
    if rank == 0:
        ours.zero_grad()
    with pytest.raises(SpillError, match="have changed"):
        ours.step()
    ours.zero_grad()
    ours.load_state_dict(before[1])
    with pytest.raises(SpillError, match="load an earlier state into model and optimizer"):
        ours.step()
    model.load_state_dict(before[0])
    with failing("posix_fallocate", errno.ENOSPC, rank == 1):  # what was loaded goes to disk
        _unable(model, rank, batch)
    train(plain, theirs, batches())
    for of, optimizer in ((plain, theirs), (model, ours)):
        train(of, optimizer, batches(), 2)
    return alike(model, plain) and any(are_offloaded(ours))


def _unable(model: Any, rank: int, batch: Callable[[], Tensor]) -> None:
    if rank == 1:
        with pytest.raises(SpillError, match="No space left"):
            model(batch())
    else:
        loss = model(batch())
        with pytest.raises(AgreementError, match=r"ranks \[1\] can't run this step"):
            loss.backward()


def _no_disk(rank: int) -> None:
    """The tier of one rank is gone, and the others learn it before anything is planned."""
    (module, ours), budget = made("AdamW"), tight("AdamW")
    with tempfile.TemporaryDirectory() as folder:
        model = memgraph.compile(module, budget, optimizer=ours, time_limit=0.0, spill_dir=folder if rank else None)
    error, words = (SpillError, "not a folder") if rank else (AgreementError, "not a folder.* on rank 1")
    with pytest.raises(error, match=words):
        model(batches()())


def _both(rank: int) -> bool:
    _no_disk(rank)
    return _given_up(rank)


def test_an_abandoned_step_needs_an_earlier_state_and_an_error_before_one_is_raised_on_all() -> None:
    assert on_ranks(2, _both) == [True] * 2
