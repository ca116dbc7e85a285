"""Let two threads copy between memory and files, so that a step does not wait for the disk.

Before:                                After:
    write(file, 0, address, 1 << 30)       submit(lambda: write(file, 0, address, 1 << 30))
    ...  # half a second later             ...  # at once, and the interpreter is free while bytes move

Each thread copies through a small buffer of its own, because O_DIRECT takes whole pages at page boundaries, and tensors
lie anywhere.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import functools
import mmap
import os
import resource
import threading
from collections.abc import Callable
from queue import SimpleQueue

from .spill_file import PAGE, whole_pages

WORKERS = 2
CHUNK = 512 << 10  # bytes of each buffer
STAGING = WORKERS * CHUNK

IoJob = Callable[[], object]


def submit(job: IoJob) -> None:
    """Have `job` called by a worker.  Jobs begin in the order in which they were submitted, and do not raise."""
    start().put(job)


@functools.cache
def start() -> SimpleQueue[IoJob | None]:
    """Start the workers, one set for all tiers of the process, and return the queue that they empty."""
    # No executor: a Future that Ctrl-C interrupts may keep a lock that its worker needs.
    jobs: SimpleQueue[IoJob | None] = SimpleQueue()
    workers = [IoThread(jobs) for _ in range(WORKERS)]
    for worker in workers:
        worker.start()
    atexit.register(join_threads, workers)
    return jobs


# A child of fork has the queue, and none of the threads that empty it.
os.register_at_fork(after_in_child=start.cache_clear)


class IoThread(threading.Thread):
    """Does job after job, until it is given None."""

    def __init__(self, jobs: SimpleQueue[IoJob | None]) -> None:
        super().__init__(name="memgraph-disk", daemon=True)
        self.jobs = jobs

    def run(self) -> None:
        while job := self.jobs.get():
            job()
            del job  # it may hold tensors, and the next may be long in coming


def join_threads(workers: list[IoThread]) -> None:
    """Let the workers end, so that none is at a tensor when the interpreter takes it down."""
    for worker in workers:
        worker.jobs.put(None)
    for worker in workers:
        worker.join()


class OneShotEvent:
    """Lets others wait for one moment.  A bare lock, because an Event that Ctrl-C interrupts may stay locked."""

    def __init__(self) -> None:
        self.closed = True
        self.lock = threading.Lock()
        self.lock.acquire()

    def open(self) -> None:
        """The moment has come; once."""
        self.closed = False
        self.lock.release()

    def wait(self) -> None:
        """Until the moment has come."""
        while self.closed:
            # The second is for when Ctrl-C came between these two, in another thread.
            if self.lock.acquire(timeout=1):
                self.lock.release()


def write(file: int, offset: int, address: int, nbytes: int) -> None:
    """Copy memory to the file, a buffer at a time."""
    for at in range(0, nbytes, CHUNK):
        size = min(CHUNK, nbytes - at)
        ctypes.memmove(staging_buffer.address, address + at, size)
        transfer_pages(os.pwritev, file, offset + at, size)


def read(file: int, offset: int, address: int, nbytes: int) -> None:
    """Copy the file to memory, a buffer at a time."""
    for at in range(0, nbytes, CHUNK):
        size = min(CHUNK, nbytes - at)
        transfer_pages(os.preadv, file, offset + at, size)
        ctypes.memmove(address + at, staging_buffer.address, size)


def transfer_pages(call: Callable[[int, list[memoryview], int], int], file: int, offset: int, nbytes: int) -> None:
    """Write or read whole pages of the buffer; the kernel may do it in several goes."""
    done, whole = 0, whole_pages(nbytes)
    while done < whole:
        try:
            moved = call(file, [staging_buffer.view[done:whole]], offset + done)
        except OSError as error:
            if call is os.pwritev and error.errno == errno.EINVAL:
                _refuse_large(offset + whole)
            raise
        if not moved:
            raise OSError(errno.EIO, f"the file ended {whole - done} bytes early")
        if call is os.pwritev and moved % PAGE:  # nothing can go on from there past the page cache
            _refuse_large(offset + whole)
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}, {whole - done - moved} bytes were not taken")
        done += moved


def _refuse_large(end: int) -> None:
    """Say that a file may not be so large.  A write that is cut at the limit ends within a page, which O_DIRECT calls
    an invalid argument."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY and end > limit:
        raise OSError(errno.EFBIG, f"{os.strerror(errno.EFBIG)}: this process may write files of {limit} bytes")


class StagingBuffer(threading.local):
    """The memory that a thread copies through."""

    def __init__(self) -> None:
        self.view = memoryview(mmap.mmap(-1, CHUNK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.view))


staging_buffer = StagingBuffer()
