"""Who of a group is missing, found out by way of its store when a collective has failed.

    life/2: no new sign of life for 10 s         ->   rank 2 is gone or stopped
    life/2: one just now, came/2: nothing        ->   rank 2 is alive and did not come to it in time
    left/2: "KeyError: 'no batch'"               ->   rank 2 could not go on: KeyError: 'no batch'
    came/0: "gathering", came/2: "averaging"     ->   every rank has come, but rank 0 was in the gathering, ...

Each rank writes a sign of life now and then. Whoever finds out first tells the rest, so that all say the same.
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

BEATS = 6  # signs of life in the seconds of silence that are nothing but a busy machine
VERDICT = "memgraph/verdict"


@dataclass(frozen=True)
class Verdict:
    """What is known of those who are missing, as global ranks."""

    ranks: tuple[int, ...]
    fate: str


def find(
    store: Any, members: Sequence[int], me: int, collective: str, calm: float, until: float, timed_out: bool
) -> Verdict:
    """Who is missing: the first finding in the group, whoever makes it. `timed_out`: all have waited as long as they
    may, so that who comes only now is late."""
    store.set(_came(me), collective)
    found = _look(store, members, calm, until, timed_out)
    told = json.loads(store.compare_set(VERDICT, "", json.dumps([found.ranks, found.fate])))
    return Verdict(tuple(told[0]), told[1])


def _look(store: Any, members: Sequence[int], calm: float, until: float, timed_out: bool) -> Verdict:
    """Wait for everybody who lives, and at least so long that a living one would have been heard."""
    first, begun = _read(store, life, members), time.monotonic()
    late: list[int] | None = None  # those who had not come when the rest had, and half a beat later
    while not store.check([VERDICT]):
        time.sleep(calm / BEATS / 2)
        now, came = _read(store, life, members), _read(store, _came, members)
        absent = [place for place in range(len(members)) if came[place] is None]
        silent = [place for place in absent if now[place] == first[place]]
        late = absent if late is None and timed_out else late
        if words := {members[place]: why for place, why in enumerate(_read(store, left, members)) if why is not None}:
            rank, why = next(iter(words.items()))
            return Verdict((rank,), f"rank {rank} could not go on: {why.decode()}")
        if not absent:
            asked = [(what or b"").decode() for what in came]
            if late and len(set(asked)) == 1:
                return _late([members[place] for place in late])
            return _met(list(zip(members, asked, strict=True)))
        if silent and time.monotonic() > begun + calm:
            return _silent([members[place] for place in silent], calm)
        if time.monotonic() > until:
            return _late([members[place] for place in absent])
    return Verdict((), "")  # somebody was faster


def _read(store: Any, key: Callable[[int], str], members: Sequence[int]) -> list[bytes | None]:
    return [store.get(key(place)) if store.check([key(place)]) else None for place in range(len(members))]


def _met(came: Sequence[tuple[int, str]]) -> Verdict:
    """All ranks are here, each with what it was in."""
    if len({what for _, what in came}) == 1:
        return Verdict((), "every rank has come")
    words = ", ".join(f"rank {rank} was in the {what}" for rank, what in came)
    return Verdict((), f"every rank has come, but {words}: see that all ranks make the same calls")


def _silent(ranks: Sequence[int], calm: float) -> Verdict:
    return Verdict(tuple(ranks), f"{_named(ranks)} gone or stopped: no sign of life for {calm:.0f} s")


def _late(ranks: Sequence[int]) -> Verdict:
    return Verdict(tuple(ranks), f"{_named(ranks)} alive and did not come to it in time")


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} are"


def life(rank: int) -> str:
    """Where a rank writes that it lives."""
    return f"memgraph/life/{rank}"


def _came(rank: int) -> str:
    """Where a rank writes that a collective has failed there, too."""
    return f"memgraph/came/{rank}"


def left(rank: int) -> str:
    """Where a rank writes why it could not go on."""
    return f"memgraph/left/{rank}"


def beat(store: Any, key: str, pause: float, ended: threading.Event) -> None:
    """Say every `pause` seconds that this process lives, until it does not, or the store is gone."""
    with suppress(RuntimeError):
        while dist.is_initialized():
            store.set(key, str(time.monotonic_ns()))
            if ended.wait(pause):
                return
