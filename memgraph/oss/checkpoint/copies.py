"""Room for copies of states that live far: on disk as well, so that who saves them needs no memory for them.

    sharded_state_dict()   ->   12 GB of rows in nameless files of 64 MB and more

Where the disk does not take them, they lie in memory.
"""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor

from ...optim.state_parts import is_large
from ...storage.mapped_storage import MappedBuffer, TensorSpec
from ...storage.spill_file import SpillError, pages
from ...tensors.layout import alias_storage_as
from ..offloaded_states import OffloadedShards

CHUNK = 64 << 20  # bytes of a file, of which a process may have so many open


class OffloadedCopies:
    """Where copies of the states of one optimizer go: in memory, if none of them live far."""

    def __init__(self, far: OffloadedShards) -> None:
        self.far = far
        self.home: MappedBuffer | None = None
        self.at = 0  # bytes of it that are taken

    def room(self, like: Tensor) -> Tensor:
        """Room for a tensor like this one, which may be that one."""
        if self.far.far_states and is_large(like):
            with suppress(SpillError):
                return alias_storage_as(self._taken(like.untyped_storage().nbytes()), like)
        return like

    def _taken(self, nbytes: int) -> Tensor:
        if self.home is None or self.at + nbytes > self.home.nbytes:
            self.home, self.at = MappedBuffer([TensorSpec((max(CHUNK, nbytes),), (1,), torch.uint8)], self.far.where), 0
        begin, self.at = self.at, self.at + pages(nbytes)
        return self.home.mapping.seen(begin, nbytes)
