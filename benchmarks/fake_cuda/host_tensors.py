"""Tensors of a described device, whose memory is address space of the host.

on_host(a tensor on cuda:0)      ->   a tensor of the host with the same bytes
to_device(a tensor of the host)  ->   a tensor on cuda:0 from torch's allocator, with the same values
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

CUDA = torch.device("cuda", 0)


class OnHost(Tensor):
    """A result of an op of the device that stays on the host."""


def on_host(value: Any) -> Any:
    """Return a tensor of the host with the memory of a tensor of the device; other values as they are."""
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if not isinstance(value, Tensor) or value.device.type != "cuda":
        return value
    storage = value.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    there = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    empty = torch.empty(0, dtype=value.dtype)
    return empty.set_(there, value.storage_offset(), value.shape, value.stride())


def to_device(value: Any) -> Any:
    """Return a tensor of the device with the values of a tensor of the host; other values as they are."""
    if isinstance(value, OnHost):
        return value.as_subclass(Tensor)
    if not isinstance(value, Tensor):
        return value
    there = allocated_like(value)
    if value.numel() and not value.is_meta:
        on_host(there).copy_(value)
    return there


def allocated_like(value: Tensor) -> Tensor:
    """Allocate a tensor of the device with the layout of another tensor."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=CUDA)


def without_values(value: Any) -> Any:
    """Return a tensor with the layout of another one, and no memory; other values as they are."""
    if isinstance(value, torch.device):
        return torch.device("meta")
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
