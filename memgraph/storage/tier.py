"""The tier to which a step offloads, as the runtime sees it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from .async_copy import CopiedBytes
from .mapped_storage import BufferSlice


class Tier(Protocol):
    """Where offloaded values lie."""

    staging: int  # bytes of the device that copies take

    def bind(self, homes: Mapping[int, BufferSlice]) -> None:
        """Let slots be where tensors of the state live, in all flights from now on."""

    def lease(self) -> Lease:
        """Room for one step in flight."""
        ...

    def close(self) -> None:
        """Give the bytes back, those of a lease that is out when it is released."""


class Lease(Protocol):
    """Room in the far tier for one step in flight, and what has moved there; nothing, if nobody notes its times."""

    moved: CopiedBytes

    def bind(self, homes: Mapping[int, BufferSlice]) -> None:
        """Let slots be where tensors of the state live, in this flight alone."""

    def offload(self, slot: int, tensor: Tensor) -> None:
        """Begin to copy a tensor out; its bytes must not change until `free`."""

    def free(self, slot: int) -> None:
        """What comes now comes behind that copy, so that the tensor's bytes may go."""

    def reload(self, slot: int, tensor: Tensor) -> None:
        """Begin to fill a tensor with what lies in the slot."""

    def wait(self, slot: int) -> None:
        """What comes now comes behind that copy, so that the tensor may be read."""

    def release(self) -> None:
        """Let what has begun end, and give the room back."""
