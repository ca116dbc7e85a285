"""Parameters that come in forward, and states that live on disk: together they are the plain training, to the bit.

All of one kind is tried in one start of two ranks: what is returned is what went wrong.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

from memgraph.errors import AgreementError
from memgraph.storage.spill_file import SpillError
from passes import Stream
from tests.memgraph.oss.checkpoint.test_full_state import same
from tests.memgraph.oss.compiled.test_forward_gathers import measured_anew
from tests.memgraph.oss.test_offloaded_states import (
    FAULTS,
    alike,
    are_offloaded,
    batches,
    begun_again,
    compiled,
    is_kept,
    made,
    train,
)
from tests.support.faults import failing
from tests.support.ranks import on_ranks

WAYS = (False, True)  # whether ranks send messages, or read each other's memory


def lacking(model: nn.Module) -> int:
    """Count the parameters that are not whole on this rank."""
    return sum(bool(parameter.isnan().any()) for parameter in model.parameters())


def are_same(ranks: tuple[Any, Any], plain: tuple[Any, Any]) -> bool:
    """Return True if parameters and states are equal once all is gathered."""
    (model, ours), (module, theirs) = ranks, plain
    ours.gather()
    return alike(model, module) and same(ours.state_dict(all_ranks=True), theirs.state_dict())


def _training(rank: int, messages: bool) -> str:
    plain, (model, ours) = made("AdamW", sharded=False), compiled("AdamW", messages=messages, gather="forward")
    train(*plain, batches(), 5)
    batch = batches()
    train(model, ours, batch, 3)
    assert ours.pending_gathers.buckets == set(range(len(ours.layout.buckets)))
    assert lacking(model)
    measured_anew(model)
    train(model, ours, batch, 2)
    streamed = any(isinstance(decision, Stream) for decision in model.plan.plan)
    both = streamed and any(are_offloaded(ours)) and "memgraph.gathered" in str(model.plan.forecast.trace)
    return "" if both and is_kept(model) and are_same((model, ours), plain) else str(model.plan)


def _interrupted(rank: int, messages: bool) -> list[str]:
    """The disk of one rank fails in a step that leaves gathers to the next forward; the one that goes on leaves none."""
    wrong, once = [], compiled("AdamW", messages=messages, gather="forward")
    for name, code, after in FAULTS:
        plain, (model, ours) = made("AdamW", sharded=False), begun_again(*once)
        batch, before = batches(), 0 if name == "posix_fallocate" else 1  # which makes room for new states
        train(*plain, batches(), before + 2)
        train(model, ours, batch, before)
        assert bool(lacking(model)) == bool(before)
        model(batch()).backward()
        assert ours.pending_gathers.by_forward
        for times in (after, 0):
            with (
                failing(name, code, rank == 1, times),
                pytest.raises(SpillError, match=f"{os.strerror(code)}.* on rank 1"),
            ):
                ours.step()
            assert not ours.pending_gathers.buckets
            assert not lacking(model)
            ours.gather()
        ours.step()
        assert not lacking(model)
        ours.zero_grad()
        train(model, ours, batch)
        assert lacking(model)
        wrong += [name] * (not are_same((model, ours), plain))
    return wrong


def _unable(rank: int, messages: bool) -> bool:
    """There is no room on the disk of one rank for states that are to live there, when parameters are awaited."""
    plain, (model, ours) = made("AdamW", sharded=False), compiled("AdamW", messages=messages, gather="forward")
    train(*plain, batches(), 3)
    batch: Callable[[], Tensor] = batches()
    train(model, ours, batch, 2)
    for state in ours.inner.state.values():
        state |= {key: value.clone() for key, value in state.items() if isinstance(value, Tensor)}
    error, words = (SpillError, "No space left") if rank else (AgreementError, r"ranks \[1\] can't run this step")
    with failing("posix_fallocate", errno.ENOSPC, rank == 1), pytest.raises(error, match=words):
        model(batches()())
    assert lacking(model)
    train(model, ours, batch)
    return are_same((model, ours), plain) and any(are_offloaded(ours))


def _all(rank: int) -> tuple[list[str], list[list[str]], list[bool]]:
    return (
        [_training(rank, messages) for messages in WAYS],
        [_interrupted(rank, messages) for messages in WAYS],
        [_unable(rank, messages) for messages in WAYS],
    )


@pytest.mark.long
def test_forward_gathers_what_is_updated_with_states_on_disk() -> None:
    assert on_ranks(2, _all) == [(["", ""], [[], []], [True, True])] * 2
