"""Ranks compare what they are about to do, before they do what only all of them can.

    rank 0: the step of 8 rows     rank 1: the step of 9 rows     ->    AgreementError on both

It is 8 bytes from each, and may go on beside what needs nobody else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress

import torch
import torch.distributed as dist

from ...errors import AgreementError
from .exchange import BucketComm

NEW = 0  # what a rank is about to run is yet to be planned
GATHER = 2  # it gathers what is awaited, and runs nothing
UNABLE = 4  # what it is about to run can't be run
KINDS = {NEW: "a new kind of call", GATHER: "a call of gather(), or a new kind of call, which begins with one"}
ADVICE = "All ranks have to make the same calls, with inputs of the same shapes."


def check_same_step(exchange: BucketComm, device: torch.device, known: int) -> Callable[[], None]:
    """Begin to compare what the ranks are about to do: the `digest` of a step, NEW, GATHER, or UNABLE.

    Returns:
        waits for it, and raises an AgreementError if a rank does something else than this one
    """
    watchdog, what = exchange.watchdog, "comparison of steps"
    mine = exchange.numbers([known], torch.int64, device)
    every = [torch.empty_like(mine) for _ in watchdog.members]
    with watchdog.naming(what):
        work = dist.all_gather(every, mine, group=watchdog.group, async_op=True)

    def compare() -> None:
        with watchdog.naming(what):
            watchdog.wait(work)
        said = torch.cat(every).tolist()
        if unable := [rank for rank, one in zip(watchdog.members, said, strict=True) if one == UNABLE]:
            raise AgreementError(f"ranks {unable} can't run this step, and say why; nothing was exchanged here")
        if others := [rank for rank, one in zip(watchdog.members, said, strict=True) if one != known]:
            mine = KINDS.get(known, "a step that it knows")
            raise AgreementError(
                f"rank {watchdog.members[exchange.rank]} has {mine}, and something else have ranks {others}. {ADVICE}"
            )

    return compare


def announce_failure(exchange: BucketComm, device: torch.device) -> None:
    """Tell the others that what they are about to run can't be run here."""
    with suppress(AgreementError):
        check_same_step(exchange, device, UNABLE)()


def digest(text: str) -> int:
    """63 bits of a text, odd, so that they are no kind of call."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1 | 1
