"""The ranks of a pipeline, in the order of the group.

rank 0: "8 rows"    rank 1: "9 rows"    ->    AgreementError on both
rank 1: IndexError in its stage         ->    IndexError on all ranks, with a note of rank and stage
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist

from ...errors import AgreementError, CollectiveError
from ...oss.comm.agreement import check_agreement, report_errors
from ...oss.comm.rank_group import SHOWN, all_texts
from ...oss.comm.watchdog import CollectiveWatchdog
from ...oss.grad_scaler import GradScaler

FIRST_ERROR = "memgraph/first error of a stage"
PLANNING_ERROR = "memgraph/latest error of planning"
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
        self.stage = self.rank  # the one that runs, for the note of an error
        self.stages = self.ranks

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
            reported = self._error_at(PLANNING_ERROR)
            if reported is None or f"{type(reported).__name__}: {reported}"[:SHOWN].split("\n")[0] not in str(
                difference
            ):
                raise
            raise reported from difference

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

    @contextmanager
    def reporting(self, subject: str) -> Iterator[None]:
        """Raise this rank's error, and the same on the others, or an AgreementError if they don't have its class."""
        if self.watchdog is None:
            yield
            return
        with report_errors(self.watchdog, subject, ADVICE):
            try:
                yield
            except Exception as error:
                note = f"raised in {subject}, on rank {self.watchdog.members[self.rank]}"
                with suppress(RuntimeError):
                    self.watchdog.store.set(PLANNING_ERROR, _pickled(error, note))
                raise

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
        """Raise the first error of any rank on all of them.

        The rank that fails closes its connections, on which others wait; and so do these.
        """
        try:
            yield
        except CollectiveError as error:
            self._close()
            first = self._error_at(FIRST_ERROR)
            if first is None:
                raise self._with_stages(error) from error
            raise first from error
        except BaseException as error:
            self._tell(error)
            raise

    def _tell(self, error: BaseException) -> None:
        if self.watchdog is None:
            return
        note = f"raised in stage {self.stage}, on rank {self.watchdog.members[self.rank]}"
        error.add_note(note)
        with suppress(RuntimeError):
            self.watchdog.store.compare_set(FIRST_ERROR, "", _pickled(error, note))
        self.watchdog.leave(f"{type(error).__name__}: {error} ({note})")

    def _close(self) -> None:
        if self.watchdog is not None:
            self.watchdog.close_connections()

    def _error_at(self, key: str) -> BaseException | None:
        """Return the error that another rank has left, if it can be pickled."""
        assert self.watchdog is not None
        with suppress(RuntimeError):
            if self.watchdog.store.check([key]):
                return _unpickled(self.watchdog.store.get(key))
        return None

    def _with_stages(self, error: CollectiveError) -> CollectiveError:
        """Return the error with the stages of the ranks that it names."""
        assert self.watchdog is not None
        places = {rank: self.watchdog.members.index(rank) for rank in error.ranks if rank in self.watchdog.members}
        numbers = {rank: ", ".join(map(str, range(i, self.stages, self.ranks))) for rank, i in places.items()}
        lost = "; ".join(f"rank {rank} has stage {stages}" for rank, stages in numbers.items())
        return CollectiveError(f"{error}; {lost}" if lost else str(error), error.collective, error.ranks)


def _pickled(error: BaseException, note: str) -> str:
    try:
        blob = pickle.dumps((error.with_traceback(None), note))
        pickle.loads(blob)
    except Exception:  # any error of the class's own code
        return "-"
    return base64.b64encode(blob).decode()


def _unpickled(text: bytes) -> BaseException | None:
    try:
        error, note = pickle.loads(base64.b64decode(text))
    except Exception:  # a class that this process does not have
        return None
    if isinstance(error, BaseException) and note not in getattr(error, "__notes__", ()):
        error.add_note(note)
    return error if isinstance(error, BaseException) else None
