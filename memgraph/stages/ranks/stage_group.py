"""The ranks of a pipeline, in the order of the group.

rank 0: "8 rows"    rank 1: "9 rows"    ->    AgreementError on both
rank 1: IndexError in its stage         ->    IndexError on all ranks, with a note of rank and stage
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ...errors import AgreementError, CollectiveError, MemgraphError, ShardError, StateError
from ...oss.comm.agreement import check_agreement, report_errors
from ...oss.comm.rank_group import SHOWN, all_texts
from ...oss.comm.watchdog import CollectiveWatchdog
from ...oss.grad_scaler import GradScaler

E = TypeVar("E", bound=BaseException)
REPORTED = "memgraph/latest error that all ranks raise"
EVERYWHERE = "_is_raised_on_all_ranks"  # an attribute of errors
PLANNING = "the planning of the stages"
ADVICE = "All ranks have to give the same model, arguments and batch."


class StageGroup:
    """The ranks of a process group, or this process alone if there is none."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        joined = group is not None or (dist.is_available() and dist.is_initialized())
        world: Any = dist.group.WORLD if joined else None
        self.group: Any = group or world
        self.rank, self.ranks = (dist.get_rank(self.group), dist.get_world_size(self.group)) if joined else (0, 1)
        self.watchdog = CollectiveWatchdog(self.group) if self.ranks > 1 else None
        self.beside: CollectiveWatchdog | None = None  # of other pipelines, which can't go on without this one
        self.stage: int | None = None  # the one that runs, for the note of an error
        self.stages = self.ranks
        self._is_ended = False

    def check_agreement(self, lines: Sequence[str]) -> None:
        """
        Raises:
            AgreementError: lines differ between ranks.
            Exception: what another rank has raised instead.
        """
        if self.watchdog is None:
            return
        try:
            check_agreement(self.watchdog, lines, ADVICE)
        except AgreementError as difference:
            reported = self._reported(str(difference))
            if reported is None:
                raise
            raise of_all_ranks(reported) from difference

    @contextmanager
    def together(self, subject: str) -> Iterator[list[str]]:
        """Run what each rank does by itself; if that fails on one, all raise its error, and the group goes on.

        All ranks then compare the lines that they have added, and the same `AgreementError` tells them of a difference.
        """
        lines = [f"{subject}: none failed"]
        if self.watchdog is None:
            yield lines
            return
        with report_errors(self.watchdog, subject, ADVICE):
            try:
                yield lines
            except Exception as error:
                if isinstance(error, CollectiveError):  # of the group itself, or of one beside it
                    raise
                of_all_ranks(error)
                note = f"raised in {subject}, on rank {self.watchdog.members[self.rank]}"
                with suppress(RuntimeError):
                    self.watchdog.store.set(REPORTED, _pickled(error, note))
                raise
        self.check_agreement(lines)

    def check_scaler(self, scaler: torch.amp.GradScaler) -> None:
        """
        Raises:
            ValueError: an infinity in one stage would not count in the others.
        """
        if self.watchdog is None or not scaler.is_enabled():
            return
        ranks = scaler.ranks if isinstance(scaler, GradScaler) else None
        known = [] if ranks is None else [*ranks.watchdog.members]
        if not {*self.watchdog.members} <= {*known}:
            raise ValueError(
                f"an infinity in one stage has to count on ranks {[*self.watchdog.members]}, and this scaler has "
                f"{'no group' if ranks is None else f'a group of ranks {known}'}; give memgraph.GradScaler group= the "
                "group of the pipeline, or torch.distributed.group.WORLD"
            )

    def share(self, own: bytes, name: str) -> list[bytes]:
        """Return the bytes of every rank."""
        return [own] if self.watchdog is None else all_texts(self.watchdog, own, name)

    def naming(self, name: str) -> AbstractContextManager[None]:
        """Turn the failure of a message into a `CollectiveError`."""
        return nullcontext() if self.watchdog is None else self.watchdog.naming(name)

    def wait(self, work: dist.Work | None) -> None:
        assert self.watchdog is not None
        self.watchdog.wait(work)

    @contextmanager
    def ending_together(self) -> Iterator[None]:
        """End the group with any error that not all ranks raise, and raise the first one on all of them.

        The rank that fails says so in the store and closes its connections. Each other rank sees that with its next
        sign of life, and closes its own, on which it waits.

        Raises:
            MemgraphError: the group has ended before.
        """
        if self._is_ended:
            raise MemgraphError("an earlier step of this pipeline has failed; start again with a new process group")
        self.stage = None
        try:
            yield
        except BaseException as error:
            if self.watchdog is None or isinstance(error, ShardError | StateError) or getattr(error, EVERYWHERE, False):
                raise
            self._is_ended = True
            raised = self._first_error(error)
            self._leave(raised)
            if raised is error:
                raise
            raise raised from error

    def _first_error(self, error: BaseException) -> BaseException:
        """Return the error of the rank that has failed first, if this one is of a message."""
        if not isinstance(error, CollectiveError):
            rank = dist.get_rank()
            error.add_note(f"raised {'' if self.stage is None else f'in stage {self.stage}, '}on rank {rank}")
            return error
        with suppress(RuntimeError):
            first = (_unpickled(watchdog.first_error or "") for watchdog in self._watchdogs)
            return next((each for each in first if each is not None), self._with_stages(error))
        return self._with_stages(error)

    def _leave(self, error: BaseException) -> None:
        for watchdog in self._watchdogs:
            watchdog.leave("; ".join([f"{type(error).__name__}: {error}", *_notes(error)]), _pickled(error))

    @property
    def _watchdogs(self) -> list[CollectiveWatchdog]:
        return [each for each in (self.watchdog, self.beside) if each is not None]

    def _reported(self, difference: str) -> BaseException | None:
        """Return the error that a difference tells of, if a rank has raised one."""
        assert self.watchdog is not None
        with suppress(RuntimeError):
            if self.watchdog.store.check([REPORTED]):
                error = _unpickled(self.watchdog.store.get(REPORTED).decode())
                text = f"{type(error).__name__}: {error}"[:SHOWN].split("\n")[0]
                return error if text in difference else None
        return None

    def _with_stages(self, error: CollectiveError) -> CollectiveError:
        """Return the error with the stages of the ranks that it names."""
        assert self.watchdog is not None
        places = {rank: self.watchdog.members.index(rank) for rank in error.ranks if rank in self.watchdog.members}
        numbers = {rank: ", ".join(map(str, range(i, self.stages, self.ranks))) for rank, i in places.items()}
        lost = "; ".join(f"rank {rank} has stage {stages}" for rank, stages in numbers.items())
        return CollectiveError(f"{error}; {lost}" if lost else str(error), error.collective, error.ranks)


def of_all_ranks(error: E) -> E:
    """Mark an error that all ranks raise between two collectives, after which the group goes on."""
    setattr(error, EVERYWHERE, True)
    return error


def _notes(error: BaseException) -> list[str]:
    return list(getattr(error, "__notes__", ()))


def _pickled(error: BaseException, *notes: str) -> str:
    """Return an error as text; one that can't be pickled as the nearest class that can."""
    for each in (error, *type(error).__mro__[:-2]):
        text = str(error) if each in (error, type(error)) else f"{type(error).__name__}: {error}"
        with suppress(Exception):  # any error of the class's own code
            blob = pickle.dumps((each, text, [*_notes(error), *notes]))
            pickle.loads(blob)
            return base64.b64encode(blob).decode()
    return ""


def _unpickled(text: str) -> BaseException | None:
    try:
        each, said, notes = pickle.loads(base64.b64decode(text))
        error = each if isinstance(each, BaseException) else each.__new__(each, said)  # a class may ask for more
    except Exception:  # a class that this process does not have
        return None
    for note in notes:
        if note not in _notes(error):
            error.add_note(note)
    return error if isinstance(error, BaseException) else None
