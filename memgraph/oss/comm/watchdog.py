"""A rank that is gone or late is named, with the collective that it was wanted in.

    with watchdog.naming("reduce-scatter of bucket 2"):
        watchdog.wait(work)

    RuntimeError: Connection closed by peer [127.0.0.1]:33187     ->
    CollectiveError: the reduce-scatter of bucket 2 has failed, because rank 2 is gone: ...

Each rank writes a sign of life to the group's store now and then; the collectives themselves cost nothing more. Only
when one fails do the others look who has fallen silent, or lives and has not come. Whoever finds out first tells the
rest, so that all say the same.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from ...errors import CollectiveError, MemgraphError, ShardError, StateError
from .liveness import BEATS, VERDICT, Verdict, beat, find, left, life

T = TypeVar("T")
CALM = 10.0  # seconds of silence that are nothing but a busy machine, where the timeout leaves room for that
SHARE = 0.4  # of a timeout that leaves none
NEVER = 6  # the tag of a message that nobody sends


class CollectiveWatchdog:
    """Who of a group is there, as this rank sees it; ends with whoever holds it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.members = group, dist.get_process_group_ranks(group)
        self.is_gloo = all(group._get_backend(device).name() == "gloo" for device in group._device_types)
        self.device = _device(group)
        limit = _timeout(group, self.device).total_seconds()
        self.limit, self.calm = limit, min(CALM, SHARE * limit)
        self.store: Any = None
        if len(self.members) > 1:
            self.store = _own_store(group)
            self._live()

    def _live(self) -> None:
        ended = threading.Event()
        arguments = self.store, life(self.group.rank()), self.calm / BEATS, ended
        pulse = threading.Thread(target=beat, args=arguments, name="memgraph pulse", daemon=True)
        pulse.start()
        weakref.finalize(self, _end, pulse, ended)

    @contextmanager
    def naming(self, collective: str) -> Iterator[None]:
        """Around a collective: its failure becomes a `CollectiveError`."""
        begun = time.monotonic()
        try:
            yield
        except RuntimeError as error:  # torch has no type of its own for what gloo reports
            if isinstance(error, MemgraphError) or len(self.members) == 1 or _is_of_memory(error):
                raise
            ended = time.monotonic()
            # Who has not come by the end of the timeout is late, and whether it lives is heard after that.
            timed_out = ended >= begun + self.limit
            until = ended + self.calm * (1 + 2 / BEATS) if timed_out else begun + self.limit
            verdict = self._verdict(collective, until, timed_out)
            raise _error(collective, verdict, error, self.members[self.group.rank()]) from error

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Around what others wait for, and nobody can do in this rank's place: if it fails, they wait no longer."""
        try:
            yield
        except (CollectiveError, ShardError, StateError):  # which all ranks raise
            raise
        except BaseException as error:
            if self.store is not None:
                self._leave(f"{type(error).__name__}: {error}")
            raise

    def _leave(self, why: str) -> None:
        """Leave word, and close the group's connections, on which others wait: gloo does that when time is up."""
        me = self.group.rank()
        with suppress(RuntimeError):
            self.store.set(left(me), why)
            if self.is_gloo:
                never = dist.irecv(torch.empty(1), group=self.group, group_src=int(me == 0), tag=NEVER)
                assert never is not None
                never.wait(timedelta(milliseconds=1))

    def wait(self, work: dist.Work | None) -> None:
        """Wait for a collective as long as the group's timeout allows."""
        if work is None:  # a group that this rank is not in
            return
        if self.is_gloo:
            work.wait(timedelta(seconds=self.limit))
        else:
            work.wait()  # with a time, NCCL would hold up the host

    def _verdict(self, collective: str, until: float, timed_out: bool) -> Verdict:
        if _within(self.calm, partial(self.store.check, [VERDICT])) is not None:
            here = self.members, self.group.rank(), collective
            look = partial(find, self.store, *here, self.calm, until, timed_out)
            found = _within(max(until - time.monotonic(), self.calm) + self.calm, look)
            if found is not None:
                return found
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return Verdict((), "torchrun's agent, which keeps the store, does not answer")
        return Verdict((0,), "rank 0 is gone or stopped, and with it the store that it keeps")


def _device(group: dist.ProcessGroup) -> torch.device:
    """Where small things are sent from: host memory, if the group can."""
    kinds = {device.type for device in group._device_types}
    if "cpu" in kinds:
        return torch.device("cpu")
    return torch.device(kinds.pop(), torch.accelerator.current_device_index())


def _timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    backend: Any = group._get_backend(device)
    options = getattr(backend, "options", None)  # MPI has none
    return getattr(options, "_timeout", default_pg_timeout)


def _own_store(group: dist.ProcessGroup) -> Any:
    """Another connection to the group's store: on the first one somebody may be waiting."""
    store: Any = group.get_group_store()
    try:
        return store.clone()
    except RuntimeError as error:  # torch's are, also those of its network
        verdict = Verdict((), "the store of the process group does not answer")
        raise _error("meeting of the ranks", verdict, error) from error


def _end(pulse: threading.Thread, ended: threading.Event) -> None:
    """Before Python ends, since a thread that is then in the store's C++ would end it by an abort."""
    ended.set()
    if pulse is not threading.current_thread():
        pulse.join(1.0)


def _within(seconds: float, ask: Callable[[], T]) -> T | None:
    """The answer of a store, or None: one whose process has been stopped would never answer."""
    answers: list[T] = []

    def run() -> None:
        with suppress(RuntimeError):
            answers.append(ask())

    asking = threading.Thread(target=run, daemon=True)
    asking.start()
    asking.join(seconds)
    return answers[0] if answers else None


def _is_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def _error(collective: str, verdict: Verdict, error: RuntimeError, me: int | None = None) -> CollectiveError:
    said = str(error).splitlines()[0]
    advice = "look into the log of that process" if verdict.ranks else "look into the first error of each process"
    fate = verdict.fate
    if me in verdict.ranks:
        fate = f"the others have gone on without rank {me}, which is this process ({fate})"
        advice = "see why it was stopped or late"
    text = f"the {collective} has failed: {fate}; {advice} and start again from the last checkpoint ({said})"
    return CollectiveError(text, collective, verdict.ranks)
