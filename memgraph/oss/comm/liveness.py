"""Find out from the store of a group which rank is missing, after a collective has failed.

    life/2: no new sign of life for 10 s         ->   rank 2 is gone or stopped
    life/2: one just now, came/2: nothing        ->   rank 2 is alive and did not come to it in time
    left/2: "KeyError: 'no batch'"               ->   rank 2 could not go on: KeyError: 'no batch'
    came/0: "gathering", came/2: "averaging"     ->   every rank has come, but rank 0 was in the gathering, ...

Each rank writes a sign of life now and then. The first rank with a verdict writes it, so that all report the same.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

BEATS = 6  # signs of life in the seconds of silence that a busy machine may cause
VERDICT = "memgraph/verdict"
ENDED = "memgraph/ended"


@dataclass(frozen=True)
class Verdict:
    """The missing ranks, as global ranks, and the reason in words."""

    ranks: tuple[int, ...]
    reason: str


def find_missing(
    store: Any, members: Sequence[int], rank: int, collective: str, silence: float, until: float, timed_out: bool
) -> Verdict:
    """Return the first verdict of the group on who is missing.

    Args:
        silence: seconds without a sign of life after which a rank counts as gone.
        timed_out: the timeout has passed, so a rank that comes only now is late.
    """
    store.set(store_key("came", rank), collective)
    verdict = _look(store, members, silence, until, timed_out)
    first = json.loads(store.compare_set(VERDICT, "", json.dumps([verdict.ranks, verdict.reason])))
    return Verdict(tuple(first[0]), first[1])


def _look(store: Any, members: Sequence[int], silence: float, until: float, timed_out: bool) -> Verdict:
    first, start = _read(store, "life", members), time.monotonic()
    late: list[int] | None = None  # ranks that came half a beat or more after the others
    while not store.check([VERDICT]):
        time.sleep(silence / BEATS / 2)
        now, came = _read(store, "life", members), _read(store, "came", members)
        absent = [place for place in range(len(members)) if came[place] is None]
        silent = [place for place in absent if now[place] == first[place]]
        late = absent if late is None and timed_out else late
        for rank, why in zip(members, _read(store, "left", members), strict=True):
            if why is not None:
                return Verdict((rank,), f"rank {rank} could not go on: {why.decode()}")
        if not absent:
            names = [(name or b"").decode() for name in came]
            if late and len(set(names)) == 1:
                return _late([members[place] for place in late])
            return _all_came(list(zip(members, names, strict=True)))
        if silent and time.monotonic() > start + silence:
            gone = [members[place] for place in silent]
            return Verdict(tuple(gone), f"{_ranks_are(gone)} gone or stopped: no sign of life for {silence:.0f} s")
        if time.monotonic() > until:
            return _late([members[place] for place in absent])
    return Verdict((), "")  # another rank was faster


def _read(store: Any, kind: str, members: Sequence[int]) -> list[bytes | None]:
    keys = [store_key(kind, place) for place in range(len(members))]
    return [store.get(key) if store.check([key]) else None for key in keys]


def _all_came(names: Sequence[tuple[int, str]]) -> Verdict:
    if len({name for _, name in names}) == 1:
        return Verdict((), "every rank has come")
    each = ", ".join(f"rank {rank} was in the {name}" for rank, name in names)
    return Verdict((), f"every rank has come, but {each}: see that all ranks make the same calls")


def _late(ranks: Sequence[int]) -> Verdict:
    return Verdict(tuple(ranks), f"{_ranks_are(ranks)} alive and did not come to it in time")


def _ranks_are(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} are"


def store_key(kind: str, rank: int) -> str:
    """Key of a rank's sign of life, of the collective that failed there, or of why it left: "life", "came", "left"."""
    return f"memgraph/{kind}/{rank}"


def beat(store: Any, key: str, pause: float, ended: threading.Event, look: Callable[[], None]) -> None:
    """Write a sign of life every `pause` seconds and look at the group, until that has ended or the store is gone."""
    with suppress(RuntimeError):
        while dist.is_initialized():
            store.set(key, str(time.monotonic_ns()))
            look()
            if ended.wait(pause):
                return
