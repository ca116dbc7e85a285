"""If the constructor refuses arguments on one rank, the other ranks are told and do not wait."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim

import memgraph
from memgraph import AgreementError, CollectiveError, ShardError
from memgraph.oss.comm.watchdog import _own_store
from tests.memgraph.oss.checkpoint.test_full_state import refusal
from tests.support.ranks import on_ranks

OWN: list[tuple[type[Exception], dict[str, Any], str]] = [
    (ValueError, {"lr": -1.0}, "ValueError: Invalid learning rate: -1.0 on rank 1"),
    (ValueError, {"params": []}, "ValueError: optimizer got an empty parameter list on rank 1"),
    (TypeError, {"momentum": 0.5}, "momentum"),
    (ShardError, {"optim": "Adam"}, "ShardError: optim is a str, 'Adam'; give the class of an optimizer"),
    (ShardError, {"wire_dtype": torch.int8}, "ShardError: wire_dtype=torch.int8"),
    (ShardError, {"gradients": "sum"}, "ShardError: gradients='sum'"),
]
SENT: list[dict[str, Any]] = [{"wire_dtype": torch.bfloat16}, {"gradients": "same"}, {"bucket_bytes": 64}]
ADDED: list[tuple[type[Exception], Any]] = [(TypeError, 3), (KeyError, {"lr": 0.1}), (ValueError, {"lr": -1.0})]


def _optimizer(**given: Any) -> memgraph.OSS:
    torch.manual_seed(0)
    return memgraph.OSS(**{"params": [nn.Parameter(torch.randn(3, 4))], "optim": optim.Adam, **given})


def _refused(call: Any, kind: type[Exception], rank: int) -> str:
    """Return the message of a refused call: of this kind on rank 1, and of rank 0 because of rank 1."""
    return refusal(kind if rank else AgreementError, call)


def _told(rank: int) -> list[str]:
    messages = [_refused(lambda given=given: _optimizer(**given if rank else {}), kind, rank) for kind, given, _ in OWN]
    messages += [refusal(AgreementError, lambda given=given: _optimizer(**given if rank else {})) for given in SENT]
    optimizer = _optimizer()
    for kind, wrong in ADDED:
        fresh = {"params": [nn.Parameter(torch.ones(2))]}
        bad = {**fresh, **wrong} if kind is ValueError else wrong
        messages.append(_refused(lambda given=bad if rank else fresh: optimizer.add_param_group(given), kind, rank))
        assert len(optimizer.param_groups) == 1
    optimizer.param_groups[0]["params"][0].grad = torch.ones(3, 4)
    optimizer.step()  # goes on as before
    messages += _at_a_step(optimizer, rank)
    messages.append(
        refusal(ShardError, memgraph.save_sharded, "/", nn.Linear(1, 1), optim.SGD(nn.Linear(1, 1).parameters()))
    )
    messages.append(
        refusal(ShardError, memgraph.load_sharded, "/", nn.Linear(1, 1), optim.SGD(nn.Linear(1, 1).parameters()))
    )
    if rank:  # which sends nothing any more
        optimizer.sharded_step.is_half_updated = True
        for call in (optimizer.step, lambda: optimizer.clip_grad_norm_(1.0)):
            assert refusal(ShardError, call).startswith("a step failed when some parameters were updated")
    return messages


def _at_a_step(optimizer: memgraph.OSS, rank: int) -> list[str]:
    """Refused on all ranks alike, and nothing has changed."""
    group, parameter = optimizer.param_groups[0], optimizer.param_groups[0]["params"][0]
    before, lr = parameter.detach().clone(), group["lr"]
    group["lr"] = lr * (1 + rank)
    messages = [refusal(AgreementError, optimizer.step)]
    group["lr"] = lr
    messages.append(refusal(ShardError, optimizer.step if rank else lambda: optimizer.clip_grad_norm_(1.0)))
    for call in (memgraph.save_sharded, memgraph.load_sharded):
        texts = refusal(AgreementError, call, f"/nowhere/{rank}", nn.Linear(1, 1), optimizer)
        assert texts.startswith(
            "the ranks disagree on the folder: /nowhere/0 on rank 0; /nowhere/1 on rank 1. Give the"
        )
    messages.append(refusal(AgreementError, lambda: optimizer.consolidate_state_dict(to=rank)))
    assert torch.equal(parameter, before)
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    assert not torch.equal(parameter, before)
    return messages


def test_what_one_rank_refuses_is_an_error_on_the_others() -> None:
    others, own = on_ranks(2, _told)
    for texts, (_, _, text) in zip(others, OWN, strict=False):
        assert texts.startswith("the ranks disagree on the optimizer: Adam on rank 0; ") and text in texts
    sent = others[len(OWN) : len(OWN) + len(SENT)]
    assert sent == own[len(OWN) : len(OWN) + len(SENT)]
    assert all(texts.startswith("the ranks disagree on what is sent: gradients='average', wire") for texts in sent)
    assert "wire_dtype=None, " in sent[0] and "wire_dtype=torch.bfloat16, " in sent[0]
    assert "param_group is a int; give a dict on rank 1" in others[len(OWN) + len(SENT)]
    step = others[-5:-2]
    assert step == own[-5:-2] and step[0].startswith("the ranks disagree on lr of group 0: 0.001 on rank 0; 0.002")
    assert step[1] == "some ranks have a call of clip_grad_norm_, others have not; call the same on all ranks"
    assert "where the state goes: to=0 on rank 0; to=1 on rank 1. Give the same" in step[2]
    assert others[-1] == own[-1] and others[-1].startswith("the optimizer is a SGD; give a memgraph.OSS, as")


class _Deaf:
    """A process group, and its store, which does not answer."""

    def get_group_store(self) -> _Deaf:
        return self

    def clone(self) -> _Deaf:
        raise torch.distributed.DistNetworkError("The client socket has timed out\nframe #0")


def test_a_store_that_does_not_answer_is_an_error_of_ours() -> None:
    group: Any = _Deaf()
    with pytest.raises(CollectiveError, match=r"the store of the process group does not answer; .* timed out\)$"):
        _own_store(group)
