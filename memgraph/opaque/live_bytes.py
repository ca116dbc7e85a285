"""The bytes of tensors that are alive at once, each storage once, and their peak.

y = x * 2; z = y + 1; del y; w = z + 1     ->   z and y were alive together, then w and z: a peak of two tensors
saved = SavedTensors(bytes); with saved.replaced(): z = x.exp()
                                           ->   autograd keeps no bytes of z, but z counts until the graph is freed
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import CaptureError


class _Kept:
    """Stands for the bytes of a storage, as long as autograd would keep them."""


@dataclass
class _Block:
    storage: StorageWeakRef  # while it exists, no other storage gets the address
    nbytes: int
    kept: weakref.ref[_Kept] | None = None

    @property
    def is_live(self) -> bool:
        return not self.storage.expired() or (self.kept is not None and self.kept() is not None)


class LiveBytes:
    """Counts the storages that are added for as long as they live; those of `elsewhere` have no bytes here.

    A peak below `least` is not looked for, and then `peak` is `least`.
    """

    def __init__(self, elsewhere: Iterable[Tensor] = (), least: float = 0) -> None:
        self.peak: float = least
        self._now = 0
        self._blocks: dict[int, _Block] = {}
        for tensor in elsewhere:
            self.add(tensor, 0)

    @property
    def now(self) -> int:
        """The bytes that are alive."""
        self._forget_freed()
        return self._now

    def add(self, tensor: Tensor, nbytes: int | None = None) -> None:
        """Count a tensor's storage, if it is new."""
        self._block(tensor, nbytes)

    def keep(self, tensor: Tensor) -> _Kept:
        """Count a tensor's storage until what this returns is gone."""
        block = self._block(tensor)
        kept = block.kept() if block.kept is not None else None
        if kept is None:
            kept = _Kept()
            block.kept = weakref.ref(kept)
        return kept

    def _block(self, tensor: Tensor, nbytes: int | None = None) -> _Block:
        storage = tensor.untyped_storage()
        if (block := self._blocks.get(storage._cdata)) is not None:
            return block
        block = _Block(StorageWeakRef(storage), storage.nbytes() if nbytes is None else nbytes)
        self._blocks[storage._cdata] = block
        self._now += block.nbytes
        if self._now > self.peak:
            self._forget_freed()
            self.peak = max(self.peak, self._now)
        return block

    def _forget_freed(self) -> None:
        self._blocks = {key: block for key, block in self._blocks.items() if block.is_live}
        self._now = sum(block.nbytes for block in self._blocks.values())


class _Saved(NamedTuple):
    """A tensor that autograd saves, without its numbers."""

    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    device: torch.device
    kept: _Kept


class SavedTensors:
    """Keeps no numbers of what autograd saves in a block, and counts the bytes as if it did."""

    def __init__(self, live: LiveBytes) -> None:
        self._live = live
        self._mode: FakeTensorMode | None = None

    def replaced(self) -> AbstractContextManager[object]:
        """Replace what autograd saves in the block."""
        return saved_tensors_hooks(self._pack, self._unpack)

    @contextmanager
    def fake(self, mode: FakeTensorMode) -> Iterator[None]:
        """Give fake tensors to a backward in the block; another one is refused."""
        self._mode = mode
        try:
            yield
        finally:
            self._mode = None

    def _pack(self, tensor: Tensor) -> _Saved:
        kept = self._live.keep(tensor)
        return _Saved(tensor.dtype, tensor.shape, tensor.stride(), tensor.device, kept)

    def _unpack(self, saved: _Saved) -> Tensor:
        if self._mode is None:
            raise CaptureError("forward computes gradients itself, and nothing is saved for them here")
        with _disable_current_modes(), self._mode:
            fake = torch.empty_strided(saved.shape, saved.strides, dtype=saved.dtype, device=saved.device)
        self._live.add(fake, 0)
        return fake
