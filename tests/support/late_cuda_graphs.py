"""CUDA graphs of the late device: tasks of streams are recorded on a tape, and queued again by a replay.

    result, again = Tapes(late).record(run)     records only; `result` is in the tape's own memory
    again()                                     queues all tasks again, on the tape's own streams

As with CUDA, a stream is on the tape only after it has waited for one that is. Tasks on the tape wait only for tasks on
it, all streams are joined at its end, and the host reads no value meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import TypeVar

from torch.utils._python_dispatch import _get_current_dispatch_mode

from tests.support.late_device import Late, Marker, Queue, Reach, Space, Task, Wait

T = TypeVar("T")
POOL = 4 << 20  # bytes of the arena for one recorder
Line = tuple[Queue, Task]


class Noting(deque[Task]):
    """Records the tasks of one queue on a tape."""

    def __init__(self, queue: Queue, tape: list[Line]) -> None:
        super().__init__()
        self.queue, self.tape = queue, tape

    def append(self, task: Task) -> None:
        if not isinstance(task, Wait) or task.marker.queue is not None:  # or the event was never recorded
            self.tape.append((self.queue, task))


class Tapes:
    """Records the tasks of a late device; each recorder has one pool of memory."""

    def __init__(self, late: Late) -> None:
        self.late = late
        late.space.end -= POOL
        self.pool = Space(late.space.end, late.space.end + POOL)
        self.lines: list[int] = []  # of each tape
        self.last = late.Event()

    def record(self, run: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        late, tape = self.late, list[Line]()
        late.finish()
        kept, space = [queue.tasks for queue in late.queues], late.space
        late.recording, late.space = True, self.pool
        for queue in late.queues:
            queue.tasks = Noting(queue, tape)
        try:
            with nullcontext() if self._noting else late:
                result = run()
        finally:
            late.recording, late.space = False, space
            for queue, tasks in zip(late.queues, kept, strict=True):
                queue.tasks = tasks
        check(tape, late.queues[0])
        self.lines.append(len(tape))
        own = {queue: Queue(late, queue.name) for queue, _ in tape if queue is not late.queues[0]}
        late.queues += own.values()
        return result, lambda: self._replay([(own.get(queue, late.current[-1]), task) for queue, task in tape])

    def mark(self) -> None:
        self.last = self.late.Event()
        self.last.record(self.late.current[-1])

    def follow(self) -> None:
        self.late.current[-1].wait_event(self.last)

    def wait(self) -> None:
        self.late.finish()

    def _replay(self, tape: list[Line]) -> None:
        passed: dict[Marker, Marker] = {}
        for queue, task in tape:
            if isinstance(task, Wait | Reach):
                task = type(task)(passed.setdefault(task.marker, Marker(queue)))
            queue.tasks.append(task)
        if not self._noting:
            self.late.finish()
        self.late._run_some()

    @property
    def _noting(self) -> bool:
        """True if ops that run now are queued already."""
        return _get_current_dispatch_mode() is self.late


def check(tape: list[Line], origin: Queue) -> None:
    """Assert the rules of CUDA for a tape."""
    there, waited = set[Marker](), set[Marker]()
    last: dict[Queue, Task] = {}
    for queue, task in tape:
        if isinstance(task, Wait):
            assert task.marker in there, "a stream waits for what is not in the recording"
            waited |= {task.marker} if queue is origin else set()
        assert queue is origin or queue in last or isinstance(task, Wait), "a stream has not joined the recording"
        there |= {task.marker} if isinstance(task, Reach) else set()
        last[queue] = task
    ends = [task for queue, task in last.items() if queue is not origin]
    joined = all(isinstance(task, Reach) and task.marker in waited for task in ends)
    assert joined, "a stream was not waited for at the end of the recording"
