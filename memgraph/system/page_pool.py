"""One pool of pages for the large tensors of a CPU: ops write into the pages of freed tensors.

    hold(module, 90_000_000)   ->   up to 90 MB of pages stay in the process while the module lives
    why_not()                  ->   "", or why freed tensors go back to the system instead
    begin_peak(), peak()       ->   live bytes of all tensors on the CPU, and the most since then

A page that the system has just given takes a fault and has to be zeroed, a hundred thousand times in a large step. The
pool has as many pages as its blocks ever had at once: where no spare range is large enough, `page_pool.c` moves the
pages of several into one. It is built by the C compiler at first use, and kept beside the prices.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import weakref
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile, gettempdir

import torch

from .device import return_freed_memory, trim_freed_memory
from .measurement_cache import cache_folder
from .private_names import TESTED

LOG = logging.getLogger(__name__)
SOURCE = Path(__file__).with_suffix(".c")
FLAGS = ("-O2", "-fexceptions", "-shared", "-fPIC")  # torch's own errors pass through its frames
OFF = "MEMGRAPH_POOL"  # set to 0, torch allocates as ever: for tools that watch its calls of malloc
HUGE = "THP_MEM_ALLOC_ENABLE"  # set to 1, torch's allocator asks for huge pages, which can't be moved one by one
TORCH = (  # functions of libc10.so, in the order in which `pool_install` takes them
    "_ZN3c1015GetCPUAllocatorEv",
    "_ZN3c1015SetCPUAllocatorEPNS_9AllocatorEh",
    "_ZN3c109alloc_cpuEm",
    "_ZN3c108free_cpuEPv",
    "_ZN3c1025profiledCPUMemoryReporterEv",
    "_ZN3c1025ProfiledCPUMemoryReporter3NewEPvm",
    "_ZN3c1025ProfiledCPUMemoryReporter6DeleteEPv",
)

_held = dict[int, int]()  # bytes by the id of an owner
_returns: list[bool] = []  # not empty once it was said that freed tensors go back


class NoPoolError(Exception):
    """There is no pool in this process, for the reason in the message."""


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """Bytes of all blocks `in_use`, the `most` that these ever were, and of pages that the pool has `held`; counts of
    requests, of moves of pages, and of pages that were new."""

    requests: int
    moves: int
    new_pages: int
    in_use: int
    most: int
    held: int


def hold(owner: object, nbytes: int) -> None:
    """Keep up to `nbytes` of pages for an owner until it is freed, or as many as before, beside those of other owners.

    Spare pages of now go back to the system: a plan before this one may have needed more.
    Where there can be no pool, the C library gives freed tensors back to the system from now on.
    """
    pool = _pool()
    if isinstance(pool, str):
        if not _returns:
            LOG.warning("freed tensors go back to the system, and steps with a plan take new pages: %s", pool)
            _returns.append(True)
        return_freed_memory()
        return
    if id(owner) not in _held:
        weakref.finalize(owner, _release, pool, id(owner)).atexit = False
        trim_freed_memory()  # what was freed before lies in gaps of the C library's heap
    _held[id(owner)] = max(nbytes, _held.get(id(owner), 0))
    pool.pool_limit(0)
    _limit(pool)


def why_not() -> str:
    """Return why this process has no pool; an empty text if it has one."""
    pool = _pool()
    return pool if isinstance(pool, str) else ""


def begin_peak() -> int | None:
    """Begin to measure a peak of the bytes of all tensors on the CPU, whichever thread allocates them.

    Return those that are live now; None where there is no pool, which counts them. Those from before it do not count.
    """
    pool = _pool()
    return None if isinstance(pool, str) else int(pool.pool_begin_peak())


def peak() -> int:
    """Return the most bytes that were live at a time since `begin_peak`; 0 where there is no pool."""
    pool = _pool()
    return 0 if isinstance(pool, str) else int(pool.pool_peak())


def pool_counts() -> PoolCounts:
    """Return the counts of the process's pool.

    Raises:
        NoPoolError: there is none.
    """
    pool = _pool()
    if isinstance(pool, str):
        raise NoPoolError(pool)
    counts = (ctypes.c_long * 6)()
    pool.pool_counts(counts)
    return PoolCounts(*counts)


def _release(pool: ctypes.CDLL, owner: int) -> None:
    _held.pop(owner, None)
    _limit(pool)


def _limit(pool: ctypes.CDLL) -> None:
    pool.pool_limit(ctypes.c_long(sum(list(_held.values()))))  # a copy, since other threads may add to it


@functools.cache
def _pool() -> ctypes.CDLL | str:
    """Return the pool, or why there is none: a text, since a kept error keeps the variables of all its callers."""
    try:
        return _installed()
    except NoPoolError as error:
        return str(error)


def _installed() -> ctypes.CDLL:
    """Let torch allocate from the pool from now on.

    Raises:
        NoPoolError: this torch is not known, or the pool can't be built or loaded.
    """
    version = torch.__version__.partition("+")[0]
    if os.environ.get(OFF) == "0":
        raise NoPoolError(f"{OFF}=0")
    if os.environ.get(HUGE) == "1":
        raise NoPoolError(f"{HUGE}=1 asks torch for huge pages")
    if ".".join(version.split(".")[:2]) not in TESTED:
        raise NoPoolError(f"the allocator of torch {version} is not known; that of {', '.join(TESTED)} is")
    try:
        c10 = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        pool = ctypes.CDLL(str(_library()))
        functions = [ctypes.cast(getattr(c10, name), ctypes.c_void_p) for name in TORCH]
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        raise NoPoolError(f"its library can't be built or loaded: {error}") from error
    pool.pool_begin_peak.restype = pool.pool_peak.restype = ctypes.c_long
    if not pool.pool_install(*functions):
        raise NoPoolError(f"the allocator of torch {version} is not what it was when the pool was written")
    return pool


def _library() -> Path:
    """Return the path of the library, built unless an earlier process has done so.

    Raises:
        OSError: there is no compiler, or no folder to write to.
        SubprocessError: the compiler has failed.
    """
    digest = hashlib.sha256(SOURCE.read_bytes() + repr((FLAGS, os.uname().machine)).encode()).hexdigest()[:16]
    folder = cache_folder() or Path(gettempdir())
    library = folder / f"page_pool-{digest}.so"
    if cache_folder() is not None and library.exists():
        return library
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise OSError("there is no C compiler (cc, gcc, clang or CC=); install one, as the package gcc")
    folder.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=folder, suffix=".so", delete=False) as new:
        built = Path(new.name)
    try:
        subprocess.run([compiler, *FLAGS, str(SOURCE), "-o", str(built)], check=True, capture_output=True, timeout=60)
        return built.replace(library)  # whole for whoever loads it meanwhile
    finally:
        built.unlink(missing_ok=True)
