"""Which ops of a step will write to pages that the system has yet to give, and what that takes.

    gelu = aten.gelu.default(mm)  # f32[4, 128, 512]   ->   1 MiB in new pages, 330 us more than in old ones

glibc gives large blocks back when they are freed (`return_freed_memory`), unless they lie in a gap between others; so
what this process did before decides which ops find their memory there and which don't.  It is asked: the step's values
are allocated and freed in its order, and nothing is written to them.
"""

from __future__ import annotations

import ctypes
import mmap
from collections import defaultdict
from dataclasses import replace

import torch
from torch import Tensor

from passes import Forecast, Machine, Trace, lifetimes, predict
from passes.ir.ops import RELOAD

from ..guards.signature import kernel_modes
from ..system.device import CPU, KEPT, RETURNED, returns_freed_memory
from ..system.measurement_cache import measure_once
from ..system.setting import environment_key
from ..system.timer import timed_us

NBYTES, TRIES = 4 << 20, 9
MAPPED = 2  # the bit of a block's head by which glibc knows that the block has pages of its own

_known: dict[str, float] = {}


def page_faults_us(forecast: Forecast, machine: Machine) -> float:
    """The microseconds by which new pages would make the step longer now."""
    if machine.device != "cpu" or not returns_freed_memory():
        return 0.0
    found, us = fresh_nbytes(forecast.trace), page_fault_us()
    longer = (replace(op, us=op.us + us * found.get(op.name, 0) / mmap.PAGESIZE) for op in forecast.trace.ops)
    return predict(replace(forecast.trace, ops=tuple(longer)), machine).us - forecast.us


def fresh_nbytes(trace: Trace) -> dict[str, int]:
    """Bytes of new pages that ops take, by the op's name.

    Those of the largest blocks are new in eager too, and in the op's own price; those of a copy are written by who
    copies.
    """
    ends: defaultdict[int, list[str]] = defaultdict(list)
    for life in lifetimes(trace):
        ends[life.last].append(life.storage)
    there: dict[str, Tensor] = {}
    found: dict[str, int] = {}
    for index, op in enumerate(trace.ops):
        if not op.is_input:
            made = {made.name: torch.empty(made.nbytes, dtype=torch.uint8) for made in op.makes}
            space = torch.empty(op.workspace, dtype=torch.uint8)
            nbytes = sum(value.nbytes for value in (*made.values(), space) if _is_new(value))
            there |= made
            del made, space
            if nbytes and op.fn != RELOAD:
                found[op.name] = nbytes
        for storage in ends.pop(index, ()):
            there.pop(storage, None)
    return found


def page_fault_us() -> float:
    """The microseconds that a page takes to be given, and taken back, by as many threads as compute now."""
    key = f"page {NBYTES} {kernel_modes()} {environment_key(CPU)}"
    return measure_once(_known, key, _measure, float, float)


def _measure() -> float:
    old = torch.zeros(NBYTES // 4)
    new_us, old_us = (min(timed_us(fill, CPU)[1] for _ in range(TRIES)) for fill in (_fill_new, lambda: old.fill_(1.0)))
    return max(0.0, new_us - old_us) / (NBYTES / mmap.PAGESIZE)


def _fill_new() -> None:
    value = torch.empty(NBYTES // 4)  # as torch allocates: with huge pages, if it is told to ask for them
    if _is_new(value):
        value.fill_(1.0)
        return
    with mmap.mmap(-1, NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
        value = torch.frombuffer(pages, dtype=torch.float32).fill_(1.0)
        del value  # a view of it would keep the mapping from being closed


def _is_new(value: Tensor) -> bool:
    if not RETURNED <= value.nbytes < KEPT:
        return False
    head = int.from_bytes(ctypes.string_at(value.data_ptr() - 8, 8), "little")
    return bool(head & MAPPED)
