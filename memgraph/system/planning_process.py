"""Plan in a process that has other work: one thread at a time, and nothing is left behind.

with planning(device):
    ...                    no other thread plans; Python's collector passes over the objects of before
                           then the sources of dropped graphs and unused blocks of the device are freed
    import of a late part of torch, without a file descriptor   ->   MemgraphError: ... raise the limit ...
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..errors import MemgraphError
from .device import release_cached
from .garbage import collecting_new_objects
from .graph_sources import forgotten_sources
from .locks import PLANNING_LOCK


@contextmanager
def planning(device: torch.device) -> Iterator[None]:
    """Plan calls for a device in this block.

    Raises:
        MemgraphError: a file was needed, such as a part of torch that is imported late, and too many are open.
    """
    with PLANNING_LOCK, forgotten_sources(), collecting_new_objects():
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            raise MemgraphError(
                f"the step can't be planned: {error}; raise the limit of open files (ulimit -n, RLIMIT_NOFILE), or "
                "close some, and call again"
            ) from error
        finally:
            release_cached(device)  # pricing ops leaves blocks of sizes that no step asks for
