"""A norm that is none is refused on all ranks, and nothing is scaled."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

import memgraph
from memgraph import ShardError
from tests.memgraph.oss.checkpoint.test_full_state import refusal
from tests.support.ranks import on_ranks

WRONG: list[tuple[type[Exception], dict[str, Any], str]] = [
    (ValueError, {"max_norm": "a"}, "max_norm is a str, 'a'; give a number"),
    (TypeError, {"max_norm": None}, "max_norm is a NoneType, 'None'; give a number"),
    (ValueError, {"max_norm": -1.0}, "max_norm=-1.0; give a norm, 0 or larger"),
    (ValueError, {"max_norm": math.nan}, "max_norm=nan; give a norm, 0 or larger"),
    (ValueError, {"norm_type": "two"}, "norm_type is a str, 'two'; give a number"),
    (ValueError, {"norm_type": math.nan}, "norm_type=nan; give the order of the norm"),
    (TypeError, {"replicated": 3}, "replicated is 3; give a list of the parameters"),
    (TypeError, {"replicated": [3]}, "replicated is [3]; give a list of the parameters"),
]


def _refused(rank: int) -> None:
    parameter = nn.Parameter(torch.ones(4))
    optimizer = memgraph.OSS([parameter])
    parameter.grad = torch.ones(4)
    for kind, wrong, words in WRONG:
        for who in (0, 1):
            given = {"max_norm": 1.0, **(wrong if rank == who else {})}
            messages = refusal(
                kind if rank == who else ShardError, lambda given=given: optimizer.clip_grad_norm_(**given)
            )
            assert words in messages
    assert optimizer.clip_grad_norm_(1.0, "2") == 2
    assert optimizer.clip_grad_norm_(0, "inf") <= 1


def test_a_norm_that_is_none_is_refused_on_all_ranks() -> None:
    on_ranks(2, _refused, seconds=40)
