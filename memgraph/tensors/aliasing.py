"""Tensors that share memory: moving one would separate them.

head.weight.data = embedding.weight.data        ->  "embedding.weight and head.weight share ..."
register_buffer("seen", weight.detach()[:3])    ->  "seen and weight share ..."
fully_shard(module), which gathers into weight  ->  weight is held elsewhere
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping

import torch
from torch import Tensor, nn, optim
from torch._subclasses import FakeTensor

from .layout import has_storage, is_dense


def describe_shared_memory(
    module: nn.Module, optimizer: optim.Optimizer | None, changed: Container[str] | None = None
) -> str:
    """Say which parameter shares memory with another or with a buffer; empty if none does.

    Only pairs with one of the `changed` parameters count, if these are given.
    """
    named = dict(module.named_parameters())
    owned = set(named.values())
    groups = optimizer.param_groups if optimizer is not None else ()
    foreign = [parameter for group in groups for parameter in group["params"] if parameter not in owned]
    others = {f"parameter {i} of the optimizer that is not the module's": other for i, other in enumerate(foreign)}
    checked = [name for name in named if changed is None or name in changed]
    moved = [name for name in checked if has_storage(named[name]) and is_dense(named[name])]
    return describe_overlap(named | dict(module.named_buffers()) | others, moved)


def describe_overlap(named: Mapping[str, Tensor], moved: Collection[str]) -> str:
    """Say which of the `moved` tensors overlaps another, and what to do; empty if none does."""
    spans = sorted(
        (*address_range(tensor), name) for name, tensor in named.items() if has_storage(tensor) and tensor.numel()
    )
    until, last = 0, ""
    for begin, end, name in spans:
        if begin < until and (last in moved or name in moved):
            return f"{last} and {name} share their memory: let one Parameter stand for both"
        if end > until:
            until, last = end, name
    return ""


def held_elsewhere(named: Mapping[str, Tensor], known: Iterable[Tensor]) -> list[str]:
    """Return the names of tensors whose memory is held by others than these and the `known` ones.

    Moving it would free no memory, and what the holder writes would be lost.
    """
    own = Counter[int]()
    for tensor in {id(tensor): tensor for tensor in (*named.values(), *known)}.values():
        if has_storage(tensor):
            own[_id(tensor)] += 1 + tensor._is_view()  # a view refers to its base, too
    return [name for name, tensor in named.items() if has_storage(tensor) and _references(tensor) > own[_id(tensor)]]


def sharing_storage(moved: Mapping[str, Tensor], owned: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the `owned` tensors that share a storage with those that are `moved`, without these."""
    storages = {_id(tensor) for tensor in moved.values() if has_storage(tensor)}
    others = (tensor for name, tensor in owned.items() if name not in moved and has_storage(tensor))
    return [tensor for tensor in others if _id(tensor) in storages]


def _references(tensor: Tensor) -> int:
    """Return how many tensors hold a storage; 0 for that of a fake one."""
    if isinstance(tensor, FakeTensor):
        return 0
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) - 1  # one is the storage's own object


def _id(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def address_range(tensor: Tensor) -> tuple[int, int]:
    """Return the address of the first byte, and the one after the last."""
    begin = tensor.data_ptr()
    extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return begin, begin + extent * tensor.itemsize
