"""Forecast the page faults of a step, and their time.

    gelu = aten.gelu.default(mm)  # f32[4, 128, 512]   ->   1 MiB in new pages, 330 us more than in old ones

glibc returns large blocks to the system when they are freed (`return_freed_memory`), unless they are in a gap between
others. So the past of the process decides which ops get new pages. To find them, the step's values are allocated and
freed in its order, within the budget, and nothing is written to them.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from passes import Forecast, Machine, Trace, lifetimes, predict
from passes.ir.ops import RELOAD
from passes.schedule.buffer_reuse import with_buffer_reuse

from ..guards.signature import kernel_modes
from ..system.device import CPU, KEPT, RETURNED, returns_freed_memory
from ..system.measurement_cache import measure_once
from ..system.setting import environment_key
from ..system.timer import timed_us
from .measuring_room import rates_room, room_nbytes

HUGE = "THP_MEM_ALLOC_ENABLE"  # set to 1, torch asks for huge pages, for blocks of 2 MiB and more
NBYTES, TRIES = (4 << 20) if os.environ.get(HUGE) == "1" else (512 << 10), 9
GUESSED_US = 1.5  # of a page, where there is no room to measure it
WORKSPACE = ""  # the name of a block
MAPPED = 2  # glibc's bit in the header of a block that has its own pages

_known: dict[str, float] = {}


def page_faults_us(
    forecast: Forecast, machine: Machine, reused: Mapping[str, str], resident_nbytes: int | None = None
) -> float:
    """Return the microseconds by which page faults would make the step longer now.

    Args:
        reused: the dead value into whose memory an op writes, by the op's name.
        resident_nbytes: bytes of the module and its optimizer that are on the device now, beside which the budget is
            kept; None without a budget.
    """
    if machine.device != "cpu" or not returns_freed_memory():
        return 0.0
    batch_nbytes = sum(op.nbytes for op in forecast.trace.ops if op.fn == "input")
    room = None if resident_nbytes is None else room_nbytes(machine.budget, CPU, resident_nbytes, batch_nbytes)
    fresh = fresh_nbytes(with_buffer_reuse(forecast.trace, reused), math.inf if room is None else room)
    us = page_fault_us(rates_room(room, machine.budget))
    longer = (replace(op, us=op.us + us * fresh.get(op.name, 0) / mmap.PAGESIZE) for op in forecast.trace.ops)
    return predict(replace(forecast.trace, ops=tuple(longer)), machine).us - forecast.us


def fresh_nbytes(trace: Trace, room: float = math.inf) -> dict[str, int]:
    """Return the bytes of new pages by op name; a value for which no `room` is left counts as new.

    Not counted are the largest blocks, which are new in eager too and part of the op's price, and reloads, whose pages
    the copying thread writes.
    """
    ends: defaultdict[int, list[str]] = defaultdict(list)
    for life in lifetimes(trace):
        ends[life.last].append(life.storage)
    blocks, fresh = _Blocks(room), dict[str, int]()
    for index, op in enumerate(trace.ops):
        if not op.is_input:
            sizes = {made.name: made.nbytes for made in op.makes} | {WORKSPACE: op.workspace}
            nbytes = sum(blocks.allocate(name, size) for name, size in sizes.items())
            blocks.free(WORKSPACE)
            if nbytes and op.fn != RELOAD:
                fresh[op.name] = nbytes
        for storage in ends.pop(index, ()):
            blocks.free(storage)
    return fresh


class _Blocks:
    """Blocks of memory that nothing is written to."""

    def __init__(self, room: float) -> None:
        self.room, self._live = room, dict[str, Tensor]()

    def allocate(self, name: str, nbytes: int) -> int:
        """Return the bytes of new pages in a block; it is allocated if there is room."""
        if nbytes > self.room:
            return nbytes if RETURNED <= nbytes < KEPT else 0
        self._live[name] = block = torch.empty(nbytes, dtype=torch.uint8)
        self.room -= nbytes
        return nbytes if _is_new(block) else 0

    def free(self, name: str) -> None:
        if (block := self._live.pop(name, None)) is not None:
            self.room += block.nbytes


def page_fault_us(room: int | None = None) -> float:
    """Return the microseconds to get and return a page, with the current number of threads.

    They are guessed if measuring them would need more than `room` bytes.
    """
    if room is not None and room < NBYTES:
        return GUESSED_US
    key = f"page {NBYTES} {kernel_modes()} {environment_key(CPU)}"
    return measure_once(_known, key, _measure, float, float)


def _measure() -> float:
    new_us = min(timed_us(_fill_new, CPU)[1] for _ in range(TRIES))
    old = torch.zeros(NBYTES // 4)
    old_us = min(timed_us(lambda: old.fill_(1.0), CPU)[1] for _ in range(TRIES))
    return max(0.0, new_us - old_us) / (NBYTES / mmap.PAGESIZE)


def _fill_new() -> None:
    value = torch.empty(NBYTES // 4)  # torch's allocator, with huge pages if they are enabled
    if _is_new(value):
        value.fill_(1.0)
        return
    del value
    with mmap.mmap(-1, NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
        value = torch.frombuffer(pages, dtype=torch.float32).fill_(1.0)
        del value  # a view would keep the mapping open


def _is_new(value: Tensor) -> bool:
    if not RETURNED <= value.nbytes < KEPT:
        return False
    head = int.from_bytes(ctypes.string_at(value.data_ptr() - 8, 8), "little")
    return bool(head & MAPPED)
