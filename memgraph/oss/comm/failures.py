"""What has failed on some ranks, told to all of them, so that nobody waits for one who has raised.

rank 1: KeyError('no batch')     ->     {1: "KeyError: 'no batch'"} on all ranks
"""

from __future__ import annotations

from collections.abc import Mapping

from .texts import texts
from .watchdog import CollectiveWatchdog

SHOWN = 300  # characters of an error that others are told


def failures(watchdog: CollectiveWatchdog, mine: BaseException | str | None, what: str) -> dict[int, str]:
    """What the ranks say that have failed, by their global numbers; a collective, called `what` if it fails."""
    word = mine if isinstance(mine, str) else "" if mine is None else f"{type(mine).__name__}: {mine}"
    told = [each.decode() for each in texts(watchdog, word.encode(), what)]
    return {rank: each for rank, each in zip(watchdog.members, told, strict=True) if each}


def in_words(told: Mapping[int, str]) -> str:
    """Who has failed, and with what."""
    return "; ".join(f"{' '.join(each.split())[:SHOWN]} on rank {rank}" for rank, each in told.items())
