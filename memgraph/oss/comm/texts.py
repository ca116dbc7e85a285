"""What each rank has to say, told to all.

rank 0: b"two"     rank 1: b"three"     ->     [b"two", b"three"] on both
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from .watchdog import CollectiveWatchdog


def texts(watchdog: CollectiveWatchdog, mine: bytes, what: str) -> list[bytes]:
    """The bytes of every rank, however many; a collective, called `what` if it fails."""
    counts = [int.from_bytes(each, "little") for each in equal_texts(watchdog, len(mine).to_bytes(8, "little"), what)]
    padded = equal_texts(watchdog, mine.ljust(max(counts), b"\0"), what)
    return [each[:count] for each, count in zip(padded, counts, strict=True)]


def equal_texts(watchdog: CollectiveWatchdog, mine: bytes, what: str) -> Sequence[bytes]:
    """The bytes of every rank, which are equally many."""
    if len(watchdog.members) == 1 or not mine:
        return [mine] * len(watchdog.members)
    sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(watchdog.device)
    received = [torch.empty_like(sent) for _ in watchdog.members]
    with watchdog.naming(what):
        watchdog.wait(dist.all_gather(received, sent, group=watchdog.group, async_op=True))
    return [bytes(each.cpu().numpy()) for each in received]
