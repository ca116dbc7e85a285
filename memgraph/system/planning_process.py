"""Plan in a process that has other work: one thread at a time, and nothing is left behind.

with planning(device):
    ...                    no other thread plans; Python's collector passes over the objects of before
                           then the sources of dropped graphs and unused blocks of the device are freed
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .device import release_cached
from .garbage import collecting_new_objects
from .graph_sources import forgotten_sources
from .locks import PLANNING_LOCK


@contextmanager
def planning(device: torch.device) -> Iterator[None]:
    """Plan calls for a device in this block."""
    with PLANNING_LOCK, forgotten_sources(), collecting_new_objects():
        try:
            yield
        finally:
            release_cached(device)  # pricing ops leaves blocks of sizes that no step asks for
