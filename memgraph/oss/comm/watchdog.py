"""Wait for collectives, and name the rank that is gone or late when one fails.

    with watchdog.naming("reduce-scatter of bucket 2"):
        watchdog.wait(work)

    RuntimeError: Connection closed by peer [127.0.0.1]:33187     ->
    CollectiveError: the reduce-scatter of bucket 2 has failed, because rank 2 is gone: ...

Each rank writes a sign of life to the group's store now and then, so collectives themselves cost nothing more. When one
fails, the others look in the store for ranks that are silent, or alive and absent.

    rank 0: leave("IndexError: ...")    ->    with its next sign of life each rank closes its connections, so that
                                              whatever it waits for in this group fails at once

Find out from the store of a group which rank is missing, after a collective has failed.

    life/2: no new sign of life for 10 s         ->   rank 2 is gone or stopped
    life/2: one just now, came/2: nothing        ->   rank 2 is alive and did not come to it in time
    left/2: "KeyError: 'no batch'"               ->   rank 2 could not go on: KeyError: 'no batch'
    came/0: "gathering", came/2: "averaging"     ->   every rank has come, but rank 0 was in the gathering, ...

Each rank writes a sign of life now and then. The first rank with a verdict writes it, so that all report the same.
"""

from __future__ import annotations

import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from ...errors import CollectiveError, MemgraphError, ShardError, StateError

T = TypeVar("T")
SILENCE = 10.0  # seconds without a sign of life that a busy machine may cause
SHARE = 0.4  # of the timeout, if that is shorter
UNSENT = 6  # the tag of a message that is never sent
BEATS = 6  # signs of life in the seconds of silence that a busy machine may cause
VERDICT = "memgraph/verdict"
ENDED = "memgraph/ended"


class CollectiveWatchdog:
    """The watchdog of one group on this rank: `limit` is the timeout in seconds, `silence` that of a sign of life."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.members = group, dist.get_process_group_ranks(group)
        self.is_gloo = _is_gloo(group)
        self.device = _device(group)
        limit = _timeout(group, self.device).total_seconds()
        self.limit, self.silence = limit, min(SILENCE, SHARE * limit)
        self.store: Any = None
        self._earlier = ""  # how an earlier group with the same store has ended
        if len(self.members) > 1:
            self.store = _own_store(group)
            if self.store.check([ENDED]):
                self._earlier = self.store.get(ENDED).decode()
            self._start_pulse()

    def _start_pulse(self) -> None:
        ended, this = threading.Event(), weakref.ref(self)

        def look() -> None:
            watchdog = this()
            if watchdog is not None and watchdog.first_error is not None:
                watchdog.close_connections()

        arguments = self.store, store_key("life", self.group.rank()), self.silence / BEATS, ended, look
        pulse = threading.Thread(target=beat, args=arguments, name="memgraph pulse", daemon=True)
        pulse.start()
        weakref.finalize(self, _end, pulse, ended)

    @contextmanager
    def naming(self, collective: str) -> Iterator[None]:
        """Turn the failure of a collective into a `CollectiveError`."""
        start = time.monotonic()
        try:
            yield
        except RuntimeError as error:  # torch has no type of its own for what gloo reports
            if isinstance(error, MemgraphError) or len(self.members) == 1 or _is_out_of_memory(error):
                raise
            ended = time.monotonic()
            # A rank that has not come within the timeout is late; whether it is alive takes a while to hear.
            timed_out = ended >= start + self.limit
            until = ended + self.silence * (1 + 2 / BEATS) if timed_out else start + self.limit
            verdict = self._verdict(collective, until, timed_out)
            raise _error(collective, verdict, error, self.members[self.group.rank()]) from error

    @contextmanager
    def leaving_on_error(self) -> Iterator[None]:
        """Close the group's connections if an error of this rank alone keeps it from what other ranks wait for."""
        try:
            yield
        except (CollectiveError, ShardError, StateError):  # all ranks raise these
            raise
        except BaseException as error:
            if self.store is not None:
                self.leave(f"{type(error).__name__}: {error}")
            raise

    def leave(self, why: str, error: str = "") -> None:
        """Write why this rank can't go on, and end the group on all ranks; `error` is for `first_error`."""

        def tell() -> None:
            self.store.set(store_key("left", self.group.rank()), why)
            self.store.compare_set(ENDED, self._earlier, f"{time.time_ns()} {error}")

        _within(self.silence, tell)
        self.close_connections()

    @property
    def first_error(self) -> str | None:
        """The error that the first rank to leave has given; None if no rank has left."""
        if not self.store.check([ENDED]):
            return None
        ended: str = self.store.get(ENDED).decode()
        return None if ended == self._earlier else ended.partition(" ")[2]

    def close_connections(self) -> None:
        """Let a message time out: gloo then closes the connections on which others wait, and this rank too."""
        for source in range(len(self.members)):  # one whose connection is lost fails at once, and closes no other
            with suppress(RuntimeError, ValueError):  # the group may be destroyed
                if self.is_gloo and source != self.group.rank():
                    work = dist.irecv(torch.empty(1), group=self.group, group_src=source, tag=UNSENT)
                    assert work is not None
                    work.wait(timedelta(milliseconds=1))

    @cached_property
    def host_group(self) -> dist.ProcessGroup:
        """The same ranks in a group whose collectives wait for no GPU. Not yet run beside NCCL."""
        if self.is_gloo or len(self.members) == 1:
            return self.group
        limit = timedelta(seconds=self.limit)
        group = dist.new_group(self.members, limit, "gloo", use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        return group

    def wait(self, work: dist.Work | None) -> None:
        if work is None:  # this rank is not in the group
            return
        if self.is_gloo:
            self.wait_on_host(work)
        else:
            work.wait()  # with a timeout, NCCL would block the host

    def wait_on_host(self, work: dist.Work | None) -> None:
        """Wait for a collective of the group of hosts."""
        if work is not None:
            work.wait(timedelta(seconds=self.limit))

    def _verdict(self, collective: str, until: float, timed_out: bool) -> Verdict:
        if _within(self.silence, partial(self.store.check, [VERDICT])) is not None:
            this = self.members, self.group.rank(), collective
            look = partial(find_missing, self.store, *this, self.silence, until, timed_out)
            verdict = _within(max(until - time.monotonic(), self.silence) + self.silence, look)
            if verdict is not None:
                return verdict
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return Verdict((), "torchrun's agent, which keeps the store, does not answer")
        return Verdict((0,), "rank 0 is gone or stopped, and with it the store that it keeps")


optimizer_watchdogs: weakref.WeakSet[CollectiveWatchdog] = weakref.WeakSet()


def shared_watchdog() -> CollectiveWatchdog | None:
    """Return the watchdog of the group that all sharded optimizers of this process use; None if they use several."""
    watchdogs: dict[dist.ProcessGroup, CollectiveWatchdog] = {}
    for watchdog in list(optimizer_watchdogs):
        with suppress(KeyError, ValueError, RuntimeError):  # the group was destroyed
            if dist.is_initialized() and dist.get_rank(watchdog.group) >= 0:
                watchdogs[watchdog.group] = watchdog
    return next(iter(watchdogs.values())) if len(watchdogs) == 1 else None


def _is_gloo(group: dist.ProcessGroup) -> bool:
    return all(group._get_backend(device).name() == "gloo" for device in group._device_types)


def _device(group: dist.ProcessGroup) -> torch.device:
    """Return the device that small tensors are sent from: the CPU, if the backend can; else that of the group."""
    kinds = {device.type for device in group._device_types}
    if "cpu" in kinds:
        return torch.device("cpu")
    if group.bound_device_id is not None:
        return group.bound_device_id
    return torch.device(kinds.pop(), torch.accelerator.current_device_index())


def _timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    backend: Any = group._get_backend(device)
    options = getattr(backend, "options", None)  # MPI has none
    return getattr(options, "_timeout", default_pg_timeout)


def _own_store(group: dist.ProcessGroup) -> Any:
    """Open another connection to the group's store: a collective may block the first one."""
    store: Any = group.get_group_store()
    try:
        return store.clone()
    except RuntimeError as error:  # torch's are, also those of its network
        verdict = Verdict((), "the store of the process group does not answer")
        raise _error("meeting of the ranks", verdict, error) from error


def _end(pulse: threading.Thread, ended: threading.Event) -> None:
    """Stop the thread before Python ends: one that is in the store's C++ then would abort the process."""
    ended.set()
    if pulse is not threading.current_thread():
        pulse.join(1.0)


def _within(seconds: float, ask: Callable[[], T]) -> T | None:
    """Return the answer of a store, or None if it takes longer: that of a stopped process never answers."""
    answers: list[T] = []

    def run() -> None:
        with suppress(RuntimeError):
            answers.append(ask())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None


def _is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def _error(collective: str, verdict: Verdict, error: RuntimeError, own_rank: int | None = None) -> CollectiveError:
    original = str(error).splitlines()[0]
    advice = "look into the log of that process" if verdict.ranks else "look into the first error of each process"
    reason = verdict.reason
    if own_rank in verdict.ranks:
        reason = f"the others have gone on without rank {own_rank}, which is this process ({reason})"
        advice = "see why it was stopped or late"
    text = f"the {collective} has failed: {reason}; {advice} and start again from the last checkpoint ({original})"
    return CollectiveError(text, collective, verdict.ranks)


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
