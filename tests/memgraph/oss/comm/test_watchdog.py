"""A rank that is gone, stopped or late is named on all others, with the collective it was wanted in."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch.distributed as dist
from torch import optim
from torch._C._distributed_c10d import TCPStore

import memgraph
from memgraph import CollectiveError
from memgraph.oss.comm import watchdog
from memgraph.oss.step import ShardedStep
from tests.memgraph.oss.test_steps import groups, net, train
from tests.support.ranks import on_ranks

SECONDS, SILENCE = (
    5.0,
    3.2,
)  # of waiting and of silence, once the ranks have met: until then a busy machine may take long


def _left(rank: int, victim: int, how: str) -> tuple[str, tuple[int, ...], str]:
    """Return the error on a rank when another one ends in the middle of a step."""
    watchdog.SILENCE = SILENCE
    module = net()
    optimizer = memgraph.OSS(groups(module), optim.Adam)
    train(module, optimizer, 2)
    optimizer.watchdog.limit = SECONDS
    if rank == victim:
        _go_when_updating(how)
    with pytest.raises(CollectiveError) as caught:
        train(module, optimizer, 1)
    return caught.value.collective, caught.value.ranks, str(caught.value)


def _go_when_updating(how: str) -> None:
    def go(*_: object) -> None:
        if how == "late":
            time.sleep(10 * SECONDS)
        os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)

    ShardedStep._update = go  # type: ignore[assignment, method-assign]


DEFAULT = [(2, "killed"), (0, "stopped")]
SLOW = [(0, "killed"), (2, "stopped"), (0, "late"), (2, "late")]


@pytest.mark.long
@pytest.mark.parametrize("victim, how", [*DEFAULT, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)])
def test_a_rank_that_goes_in_mid_step_is_named_on_the_others(victim: int, how: str) -> None:
    found = on_ranks(3, _left, victim, how, lost=[victim])
    del found[victim]
    for collective, ranks, text in found:
        assert collective.startswith(("averaging of the gradients of param", "gathering of parameters 0 to 5"))
        assert ranks == (victim,)
        reason = "alive and did not come to it in time" if how == "late" else "gone or stopped: no sign of life for 3 s"
        assert text.startswith(
            f"the {collective} has failed: rank {victim} is {reason}; look into the log of that process"
        )


def _store_in_rank_0(rank: int, how: str) -> tuple[str, tuple[int, ...], str]:
    """The same, where the store dies with rank 0, as without torchrun."""
    store = TCPStore("127.0.0.1", 0, 3, True, wait_for_workers=False) if rank == 0 else None
    ports = [None if store is None else store.port]
    dist.broadcast_object_list(ports)
    store = store or TCPStore("127.0.0.1", ports[0] or 0, 3, False)
    dist.destroy_process_group()
    dist.init_process_group(store=store, rank=rank, world_size=3)
    return _left(rank, 0, how)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_rank_0_is_named_that_takes_the_store_with_it(how: str) -> None:
    none, *found = on_ranks(3, _store_in_rank_0, how, lost=[0])
    assert none is None
    for _, ranks, text in found:
        assert ranks == (0,)
        assert "rank 0 is gone or stopped, and with it the store that it keeps" in text


def _apart(rank: int) -> tuple[tuple[int, ...], str]:
    module = net()
    optimizer = memgraph.OSS(groups(module), optim.Adam)
    optimizer.watchdog.limit = 1.5  # after which both are heard
    with pytest.raises(CollectiveError) as caught:
        optimizer.consolidate_state_dict() if rank == 1 else train(module, optimizer, 1)
    return caught.value.ranks, str(caught.value)


def test_ranks_that_make_different_calls_are_named_with_them() -> None:
    wanted = (
        "has failed: every rank has come, but rank 0 was in the exchange of gradient flags, rank 1 was in the "
        "comparison of what the ranks were given: see that all ranks make the same calls; look into the first error of each"
    )
    for ranks, text in on_ranks(2, _apart, meet=False):
        assert ranks == ()
        assert wanted in text


def _without_one(rank: int) -> str:
    if rank == 1:
        time.sleep(10 * SECONDS)
    with pytest.raises(CollectiveError) as caught:
        memgraph.OSS(net().parameters(), optim.Adam)
    return f"{caught.value.collective} {caught.value.ranks}"


@pytest.mark.slow
def test_a_rank_that_makes_no_optimizer_is_named() -> None:
    found = on_ranks(2, _without_one, seconds=SECONDS, lost=[1])
    assert found == ["comparison of what the ranks were given (1,)", None]


def _late(rank: int, seconds: float) -> str:
    module = net()
    optimizer = memgraph.OSS(groups(module), optim.Adam)
    train(module, optimizer, 1)
    optimizer.watchdog.limit, optimizer.watchdog.silence = 6.0, 2.4  # as with a timeout of 6 s
    if rank == 1:
        time.sleep(seconds)
    try:
        train(module, optimizer, 1)
    except CollectiveError as error:
        return f"{error.ranks} {error}"
    return ""


@pytest.mark.long
def test_who_is_late_is_waited_for_as_long_as_the_timeout_says_and_then_named() -> None:
    assert on_ranks(2, _late, 4.0) == ["", ""]  # two thirds of it
    first, second = on_ranks(2, _late, 7.5, meet=False)
    assert first.startswith("(1,) ") and "rank 1 is alive and did not come to it in time" in first
    assert second.startswith("(1,) ") and "the others have gone on without rank 1" in second
