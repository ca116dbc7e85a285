"""A meter of a CUDA device that shares no code with memgraph's: it adds up the history that torch's allocator keeps.

    allocator = CudaAllocator()
    allocator.reset(); step(); allocator.most    # peak bytes of requests, each in blocks of 512

The history has each request and each block that came back, in order; memgraph's own meter reads counters.
"""

from __future__ import annotations

from typing import Any

import torch

ENTRIES = 10_000_000  # of the history, from one reset to the next
BLOCK = 512


class CudaAllocator:
    """The blocks of the current device that were requested since this object was created."""

    def __init__(self) -> None:
        self._live: dict[int, int] = {}
        self._record()

    def reset(self) -> None:
        """Reset the peak."""
        self._read()
        torch.cuda.memory._record_memory_history(None)
        self._record()

    @property
    def now(self) -> int:
        """The bytes of all live blocks."""
        return self._read()[1]

    @property
    def most(self) -> int:
        """The peak bytes of live blocks since the last reset."""
        return self._read()[2]

    def _record(self) -> None:
        self._before = dict(self._live)
        torch.cuda.memory._record_memory_history("all", context=None, max_entries=ENTRIES)

    def _read(self) -> tuple[dict[int, int], int, int]:
        """Return the live blocks, their bytes, and the peak of the bytes since the last reset."""
        snapshot: Any = torch.cuda.memory._snapshot()
        self._live = live = dict(self._before)
        now = most = sum(live.values())
        for event in snapshot["device_traces"][torch.cuda.current_device()]:
            if event["action"] == "alloc":
                live[event["addr"]] = -(-event["size"] // BLOCK) * BLOCK
                now += live[event["addr"]]
                most = max(most, now)
            elif event["action"] == "free_completed":
                now -= live.pop(event["addr"], 0)
        return live, now, most
