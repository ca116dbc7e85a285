"""Copy between memory and files on two threads of each tier, so that a step does not wait for the disk.

Before:                                After:
    write(file, 0, address, 1 << 30)       submit(lambda: write(file, 0, address, 1 << 30))
    ...  # half a second later             ...  # at once, and the interpreter is free meanwhile

To a disk, each thread copies through a small buffer of its own: O_DIRECT takes whole pages at page boundaries only, and
tensors may begin anywhere.  Files in memory are read and written without one.
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
CopyFunction = Callable[[int, int, int, int], None]  # file, offset, address, nbytes
Transfer = Callable[[int, list[memoryview], int], int]


def submit(job: IoJob, in_memory: bool = False) -> None:
    """Run `job` on a thread of the tier. Jobs of one begin in the order in which they were submitted, and must not
    raise."""
    start(in_memory).put(job)


@functools.cache
def start(in_memory: bool = False) -> SimpleQueue[IoJob | None]:
    """Start the threads, one set for all tiers of a kind in the process, and return their queue."""
    # No executor: a Future that Ctrl-C interrupts may keep a lock that its worker needs.
    jobs: SimpleQueue[IoJob | None] = SimpleQueue()
    threads = [IoThread(jobs, "memory" if in_memory else "disk") for _ in range(WORKERS)]
    for thread in threads:
        thread.start()
    atexit.register(join_threads, threads)
    return jobs


# A child of fork has the queue, but not the threads that empty it.
os.register_at_fork(after_in_child=start.cache_clear)


class IoThread(threading.Thread):
    """Runs one job after the other, until it is given None."""

    def __init__(self, jobs: SimpleQueue[IoJob | None], tier: str) -> None:
        super().__init__(name=f"memgraph-{tier}", daemon=True)
        self.jobs = jobs

    def run(self) -> None:
        while job := self.jobs.get():
            job()
            del job  # it may reference tensors, and the next one may be long in coming


def join_threads(threads: list[IoThread]) -> None:
    """End the threads, so that none touches a tensor while the interpreter shuts down."""
    for thread in threads:
        thread.jobs.put(None)
    for thread in threads:
        thread.join()


class OneShotEvent:
    """An event that is set once. A bare lock, because an Event that Ctrl-C interrupts may stay locked."""

    def __init__(self) -> None:
        self.is_set = False
        self.lock = threading.Lock()
        self.lock.acquire()

    def set(self) -> None:
        self.is_set = True
        self.lock.release()

    def wait(self) -> None:
        while not self.is_set:
            # The second is for Ctrl-C between these two lines, in another thread.
            if self.lock.acquire(timeout=1):
                self.lock.release()


def write(file: int, offset: int, address: int, nbytes: int) -> None:
    """Copy memory to the file, a buffer at a time."""
    for at in range(0, nbytes, CHUNK):
        size = min(CHUNK, nbytes - at)
        ctypes.memmove(_staging.address, address + at, size)
        transfer_pages(os.pwritev, file, offset + at, size)


def read(file: int, offset: int, address: int, nbytes: int) -> None:
    """Copy the file to memory, a buffer at a time; the bytes may begin within a page."""
    done, skipped = 0, offset % PAGE
    while done < nbytes:
        size = min(CHUNK - skipped, nbytes - done)
        transfer_pages(os.preadv, file, offset + done - skipped, skipped + size)
        ctypes.memmove(address + done, _staging.address + skipped, size)
        done, skipped = done + size, 0


def write_memory(file: int, offset: int, address: int, nbytes: int) -> None:
    """Copy memory to a file in memory."""
    _transfer(os.pwritev, file, offset, address, nbytes)


def read_memory(file: int, offset: int, address: int, nbytes: int) -> None:
    """Copy a file in memory to memory."""
    _transfer(os.preadv, file, offset, address, nbytes)


IN_MEMORY = (write_memory, read_memory)


def moves_in(memory: bool) -> tuple[CopyFunction, CopyFunction]:
    """Return what copies to a file in memory, or on a disk, and from it."""
    return IN_MEMORY if memory else (write, read)


def _transfer(call: Transfer, file: int, offset: int, address: int, nbytes: int) -> None:
    view, done = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B"), 0
    while done < nbytes:
        count = call(file, [view[done:]], offset + done)
        if not count:
            raise OSError(errno.EIO, f"the file ended {nbytes - done} bytes early")
        done += count


def transfer_pages(call: Transfer, file: int, offset: int, nbytes: int) -> None:
    """Write or read whole pages of the buffer; the kernel may need several calls, and a file may end within a page."""
    done, total = 0, whole_pages(nbytes)
    while done < (nbytes if call is os.preadv else total):
        try:
            count = call(file, [_staging.view[done:total]], offset + done)
        except OSError as error:
            if call is os.pwritev and error.errno == errno.EINVAL:
                _check_file_limit(offset + total)
            raise
        if not count:
            raise OSError(errno.EIO, f"the file ended {total - done} bytes early")
        if call is os.pwritev and count % PAGE:  # O_DIRECT can't continue within a page
            _check_file_limit(offset + total)
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}, {total - done - count} bytes were not taken")
        done += count


def _check_file_limit(end: int) -> None:
    """Raise EFBIG if a file may not be so large: O_DIRECT reports a write cut at the limit as an invalid argument."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY and end > limit:
        raise OSError(errno.EFBIG, f"{os.strerror(errno.EFBIG)}: this process may write files of {limit} bytes")


class _StagingBuffer(threading.local):
    """Page-aligned memory; threading.local calls __init__ in each thread that uses it."""

    def __init__(self) -> None:
        self.view = memoryview(mmap.mmap(-1, CHUNK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.view))


# Mutable state of the module: allocated once a thread, since an mmap in each copy would fault in all its pages again.
_staging = _StagingBuffer()
