"""Ranks compare what they are about to do, before they do what only all of them can.

    rank 0: the step of 8 rows     rank 1: the step of 9 rows     ->    AgreementError on both

It is 8 bytes from each, and may go on beside what needs nobody else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import AgreementError, CollectiveError, MemgraphError
from .exchange import BucketComm

if TYPE_CHECKING:
    from ..optimizer import OSS

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
    watch, what = exchange.watch, "comparison of steps"
    mine = exchange.numbers([known], torch.int64, device)
    every = [torch.empty_like(mine) for _ in watch.members]
    with watch.naming(what):
        work = dist.all_gather(every, mine, group=watch.group, async_op=True)

    def compare() -> None:
        with watch.naming(what):
            watch.wait(work)
        said = torch.cat(every).tolist()
        if unable := [rank for rank, one in zip(watch.members, said, strict=True) if one == UNABLE]:
            raise AgreementError(f"ranks {unable} can't run this step, and say why; nothing was exchanged here")
        if others := [rank for rank, one in zip(watch.members, said, strict=True) if one != known]:
            mine = KINDS.get(known, "a step that it knows")
            raise AgreementError(
                f"rank {watch.members[exchange.rank]} has {mine}, and something else have ranks {others}. {ADVICE}"
            )

    return compare


def announce_failure(exchange: BucketComm, device: torch.device) -> None:
    """Tell the others that what they are about to run can't be run here."""
    with suppress(AgreementError):
        check_same_step(exchange, device, UNABLE)()


@contextmanager
def announcing_failure(optimizer: OSS | None, parameters: Iterable[Tensor]) -> Iterator[None]:
    """Around what comes before `meet` in a call that reads these: what fails here on a rank, the others are told there,
    if they are sure to come.

    The rank itself raises its own error.
    """
    try:
        yield
    except (AgreementError, CollectiveError):  # which the others have, too
        raise
    except Exception:
        with suppress(MemgraphError):
            if optimizer is not None and _meets(optimizer, parameters):
                announce_failure(optimizer.exchange, optimizer.pieces.device)
        raise


def _meets(optimizer: OSS, parameters: Iterable[Tensor]) -> bool:
    """Whether ranks meet before they run a step with these parameters."""
    if optimizer.exchange.is_alone or not torch.is_grad_enabled() or not any(one.requires_grad for one in parameters):
        return False
    return optimizer.gathers == "forward" or bool(optimizer.inside.parcels({}))


def digest(text: str) -> int:
    """63 bits of a text, odd, so that they are no kind of call."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1 | 1
