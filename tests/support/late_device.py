"""A device with late streams: their tasks run at any time, in any order that their events allow.

    cuda = Late(seed=3)          has the streams and events of torch.cuda
    with cuda.noting():          ops are queued and run later; at the end all have run
        step()

Memory is one arena. It is allocated and freed when ops are queued, and not when they run, as in CUDA's allocator. So a
read or write without a wait gets other bytes, for some seed. Nothing sleeps: the next task is drawn, and each seed has
its own slow and fast streams.
"""

from __future__ import annotations

import ctypes
import random
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

from memgraph.graph.ops import RUN

META = torch.device("meta")
ALIGNED = 64
HOST = ("_local_scalar_dense", "item", "equal", "is_nonzero")  # ops whose result the host reads
VIEWS = ("_unsafe_view", "detach", "alias", "lift_fresh", "set_")
Task = Callable[[], bool]  # returns True if it could run


class Pinned:
    """Host memory that counts as pinned."""

    def register(self, flat: Tensor, device: torch.device) -> str:
        return ""

    def unregister(self, flat: Tensor) -> None:
        pass


class Marker:
    """A place in a queue."""

    def __init__(self, queue: Queue | None = None) -> None:
        self.queue, self.passed = queue, queue is None

    def reach(self) -> bool:
        self.passed = True
        return True


@dataclass(frozen=True)
class Wait:
    """A task that waits until a marker is passed."""

    marker: Marker

    def __call__(self) -> bool:
        return self.marker.passed


@dataclass(frozen=True)
class Reach:
    """A task that passes a marker."""

    marker: Marker

    def __call__(self) -> bool:
        return self.marker.reach()


class Space:
    """A part of the arena, and its allocations."""

    def __init__(self, begin: int, end: int) -> None:
        self.begin, self.end = begin, end
        self.used: dict[int, int] = {}

    def take(self, nbytes: int) -> int:
        """Allocate the first gap that is large enough; return its offset."""
        at = self.begin
        for begin, size in sorted(self.used.items()):
            if begin - at >= nbytes:
                break
            at = begin + size
        assert at + nbytes <= self.end, "the arena is full"
        self.used[at] = nbytes
        return at


class Queue:
    """A stream: its tasks run in order."""

    def __init__(self, late: Late, name: str) -> None:
        self.late, self.name = late, name
        self.tasks: deque[Task] = deque()

    def wait_event(self, event: Event) -> None:
        marker = event.marker
        if marker.queue is None or (self.name, marker.queue.name) not in self.late.deaf:
            self.tasks.append(Wait(marker))

    def wait_stream(self, other: Queue) -> None:
        event = Event(self.late)
        event.record(other)
        self.wait_event(event)


class Event:
    def __init__(self, late: Late) -> None:
        self.late, self.marker = late, Marker()

    def record(self, queue: Queue) -> None:
        self.marker = Marker(queue)
        queue.tasks.append(Reach(self.marker))

    def elapsed_time(self, other: Event) -> float:
        """Return the same for all: tasks take no time."""
        return 1.0

    def synchronize(self) -> None:
        queue = self.marker.queue
        if queue is None or ("host", queue.name) not in self.late.deaf:
            self.late.run(lambda: self.marker.passed)


class Late(TorchDispatchMode):
    """The device; `deaf` has pairs of queues (waiting, waited for) whose waits are skipped."""

    def __init__(self, seed: int, deaf: frozenset[tuple[str, str]] = frozenset(), nbytes: int = 1 << 24) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.deaf = deaf
        self.seed(seed)
        self.arena = torch.full((nbytes,), 0x5A, dtype=torch.uint8)
        self.space = Space(0, nbytes)
        self.most = 0
        self.recording = False
        self.queues = [Queue(self, "compute")]
        self.current = [self.queues[0]]
        self.is_host = False  # True while ops run on the host, at once
        self.idle = False  # True if nothing runs until the host waits for it
        self.slow: frozenset[str] = frozenset()  # queues that run a task only if no other queue can

    def seed(self, seed: int) -> None:
        """Reorder tasks by another seed from now on."""
        self.draw = random.Random(seed)

    # --- what torch.cuda has

    def Stream(self, device: torch.device) -> Queue:
        self.queues.append(Queue(self, ("out", "back")[len(self.queues) - 1] if len(self.queues) < 3 else "other"))
        return self.queues[-1]

    def Event(self, enable_timing: bool = False) -> Event:
        return Event(self)

    def current_stream(self, device: torch.device) -> Queue:
        return self.current[-1]

    @contextmanager
    def stream(self, queue: Queue) -> Iterator[None]:
        self.current.append(queue)
        yield
        self.current.pop()

    # --- running queued tasks

    def finish(self) -> None:
        self.run(lambda: not any(queue.tasks for queue in self.queues))

    def run(self, done: Callable[[], bool]) -> None:
        """Run queued tasks, in any order, until the condition holds."""
        speeds = [1e-6 if queue.name in self.slow else self.draw.choice((1, 10, 100)) for queue in self.queues]
        with _disable_current_modes(), torch.no_grad():
            while not done():
                ready = list(zip(self.queues, speeds, strict=True))
                while ready:
                    queue = self.draw.choices([q for q, _ in ready], [speed for _, speed in ready])[0]
                    if queue.tasks and queue.tasks[0]():
                        queue.tasks.popleft()
                        break
                    ready = [pair for pair in ready if pair[0] is not queue]
                else:
                    raise AssertionError("streams wait for each other for ever")

    def _run_some(self) -> None:
        if self.recording:
            return
        left = 0 if self.idle else self.draw.choice((0, 0, 0, 1, 4, 40))

        def enough() -> bool:
            nonlocal left
            left -= 1
            return left < 0 or not any(queue.tasks for queue in self.queues)

        if left:
            self.run(enough)

    # --- queueing ops

    @contextmanager
    def hosting(self, there: bool = True) -> Iterator[None]:
        """Run the body as work of the host."""
        before, self.is_host = self.is_host, there
        try:
            yield
        finally:
            self.is_host = before

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Queue the ops of the body; all of them have run at its end."""
        with self:
            yield
        self.finish()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_host and self.current[-1] is self.queues[0]:
            return func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        if func.namespace == "memgraph":
            with self:
                return RUN[name](*args, **kwargs)
        if name in HOST:
            assert not self.recording, f"{name} wants a number of what is only noted down"
            self.finish()
            return func(*args, **kwargs)
        written = [arg.name for arg in func._schema.arguments if arg.alias_info and arg.alias_info.is_write]
        aliased = [value.alias_info for value in func._schema.returns if value.alias_info]
        if (aliased and not written) or name in VIEWS or kwargs.get("device") == META:
            return func(*args, **kwargs)
        if written:
            result = kwargs[written[0]] if written[0] in kwargs else args[0]
        else:
            result = self._made(func, args, kwargs)
        self._note(func, args, kwargs, None if written else result)
        self._run_some()
        return result if func._schema.returns else None

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        args, kwargs, result = tree_map_only(Tensor, self._unowned, (args, kwargs, result))

        def work() -> bool:
            found = func(*args, **kwargs)
            if result is not None:
                for into, of in zip(_tensors(result), _tensors(found), strict=True):
                    into.copy_(of)
            return True

        self.current[-1].tasks.append(work)

    def _unowned(self, x: Tensor) -> Tensor:
        """Return the same bytes without owning them, so that they may be allocated again meanwhile."""
        at = x.data_ptr() - self.arena.data_ptr()
        if not x.numel() or not 0 <= at < self.arena.nbytes:
            return x.detach()
        unowned = torch.empty(0, dtype=x.dtype)
        return unowned.set_(self.arena.untyped_storage(), at // x.itemsize, x.shape, x.stride())

    def _made(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return results without content, with the strides of the op."""

        def meta(x: Tensor) -> Tensor:
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")

        args, kwargs = tree_map_only(Tensor, meta, (args, kwargs))
        args, kwargs = tree_map_only(torch.device, lambda device: META, (args, kwargs))
        if "device" in {arg.name for arg in func._schema.arguments} and not _tensors(args):
            kwargs["device"] = META
        return tree_map_only(Tensor, self._allocated, func(*args, **kwargs))

    def _allocated(self, like: Tensor) -> Tensor:
        """Return a tensor at the first gap of the arena that is large enough."""
        nbytes = like.untyped_storage().nbytes()
        if not nbytes:
            return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        room = -(-nbytes // ALIGNED) * ALIGNED
        at = self.space.take(room)
        self.most = max(self.most, at + room)
        block = (ctypes.c_ubyte * nbytes).from_address(self.arena.data_ptr() + at)
        weakref.finalize(block, self.space.used.pop, at)
        return torch.frombuffer(block, dtype=like.dtype).as_strided(like.shape, like.stride())


def _tensors(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []
    tree_map_only(Tensor, found.append, tree)
    return found
