"""Options that must be equal on all ranks: clipping of gradients, options of groups, frozen parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import optim

import memgraph
from memgraph import AgreementError, ShardError
from tests.memgraph.oss.checkpoint.test_full_state import refusal
from tests.memgraph.oss.test_gradients import give, tensors
from tests.support.ranks import on_ranks


def _asked(rank: int) -> list[str]:
    ours = tensors((5, 7), (3,), (4,))
    sharded = memgraph.OSS([{"params": ours[:1]}, {"params": ours[1:]}], optim.SGD, lr=0.1)
    give(ours, 0, 2, rank)
    before = [p.detach().clone() for p in ours]
    clip: Any = sharded.clip_grad_norm_
    messages = [
        refusal(AgreementError, clip, 1.0 + rank),
        refusal(AgreementError, lambda: clip(1.0, norm_type=2 - rank)),
        refusal(AgreementError, lambda: clip(1.0, error_if_nonfinite=rank == 1)),
        refusal(ValueError if rank else ShardError, clip, "a" if rank else 1.0),
        refusal(ShardError, sharded.step if rank else lambda: clip(1.0)),
    ]
    sharded.param_groups[1]["lr"] = 0.1 * (1 + rank)
    messages.append(refusal(AgreementError, sharded.step))
    sharded.param_groups[1]["lr"] = 0.1
    ours[2].requires_grad_(rank == 0)
    messages.append(refusal(AgreementError, sharded.step))
    ours[2].requires_grad_(False)
    assert all(map(torch.equal, ours, before))
    clip(torch.tensor(1.0) if rank else 1, "2" if rank else 2.0)  # the same in other words
    sharded.step()
    return messages


def test_a_call_with_other_arguments_on_one_rank_is_an_error_on_all() -> None:
    first, own = on_ranks(2, _asked)
    assert first[:3] == own[:3] and first[4:] == own[4:]
    clip = "the ranks disagree on what is called: clip_grad_norm_({}, error_if_nonfinite={}) on rank 0; "
    assert first[0].startswith(clip.format("1.0, 2.0", False) + "clip_grad_norm_(2.0, 2.0, error_if_nonfinite=False)")
    assert first[1].startswith(clip.format("1.0, 2.0", False) + "clip_grad_norm_(1.0, 1.0, error_if_nonfinite=False)")
    assert first[2].startswith(clip.format("1.0, 2.0", False) + "clip_grad_norm_(1.0, 2.0, error_if_nonfinite=True)")
    assert first[0].endswith("nothing has been updated.")
    assert own[3] == "max_norm is a str, 'a'; give a number"
    assert first[3] == f"another rank can't step, so none does: ValueError: {own[3]} on rank 1"
    assert first[4] == "some ranks have a call of clip_grad_norm_, others have not; call the same on all ranks"
    assert first[5].startswith("the ranks disagree on lr of group 1: 0.1 on rank 0; 0.2 on rank 1. Set the same on all")
    assert first[6].startswith("the ranks disagree on parameter 2: trained on rank 0; frozen on rank 1. ")


def _none_yet(rank: int) -> list[float]:
    ours = tensors((3,))
    messages = refusal(ShardError, memgraph.OSS, ours, optim.SGD, [0, 1])
    assert messages.startswith(
        "group=[0, 1] is no process group of this program; create one with torch.distributed.new_"
    )
    sharded = memgraph.OSS([{"params": []}], optim.SGD, lr=1.0)
    assert sharded.clip_grad_norm_(1.0) == 0
    sharded.step()
    assert sharded.state_dict(all_ranks=True)["state"] == {}
    sharded.add_param_group({"params": ours})
    ours[0].data.zero_()
    ours[0].grad = torch.full((3,), 1.0 + rank)
    sharded.step()
    return ours[0].tolist()


def test_parameters_may_all_come_later() -> None:
    assert on_ranks(2, _none_yet) == [[-1.5] * 3] * 2
