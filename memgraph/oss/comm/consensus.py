"""Compare the steps that ranks are about to run, before the first collective of a step.

    rank 0: the step of 8 rows     rank 1: the step of 9 rows     ->    AgreementError on both

Each rank sends 8 bytes, and may run ops that need no other rank meanwhile. They go between hosts: a comparison over a
GPU's collectives would wait for all that the GPU has been asked to do, once a step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress

import torch
import torch.distributed as dist

from ...errors import AgreementError
from .rank_group import RankGroup

NEW = 0  # a call that is not planned yet
GATHER = 2  # a gather of pending buckets, without a step
UNABLE = 4  # a call that can't run on this rank
KINDS = {NEW: "a new kind of call", GATHER: "a call of gather(), or a new kind of call, which begins with one"}
ADVICE = "All ranks have to make the same calls, with inputs of the same shapes."


def check_same_step(ranks: RankGroup, step: int) -> Callable[[], None]:
    """Start to compare what the ranks are about to run: the `digest` of a step, NEW, GATHER, or UNABLE."""
    watchdog, name = ranks.watchdog, "comparison of steps"
    own = torch.tensor([step])
    rows = [torch.empty_like(own) for _ in watchdog.members]
    with watchdog.naming(name):
        work = dist.all_gather(rows, own, group=watchdog.host_group, async_op=True)

    def compare() -> None:
        with watchdog.naming(name):
            watchdog.wait_on_host(work)
        steps = dict(zip(watchdog.members, torch.cat(rows).tolist(), strict=True))
        if unable := [rank for rank, each in steps.items() if each == UNABLE]:
            raise AgreementError(f"ranks {unable} can't run this step, and say why; nothing was exchanged here")
        if others := [rank for rank, each in steps.items() if each != step]:
            kind = KINDS.get(step, "a step that is planned")
            this = watchdog.members[ranks.rank]
            raise AgreementError(f"rank {this} is about to run {kind}; ranks {others} run something else. {ADVICE}")

    return compare


def announce_failure(ranks: RankGroup) -> None:
    """Tell the other ranks that the call they are about to run fails here."""
    with suppress(AgreementError):
        check_same_step(ranks, UNABLE)()


def digest(text: str) -> int:
    """Return 63 bits of a text's digest, odd, so that it differs from NEW, GATHER and UNABLE."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1 | 1
