"""The parameters and buffers of a rank: those that its stage reads.

embed.weight, which this stage reads        ->   as it is
last.weight, which only others read         ->   on the meta device, without bytes
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ...system.user_warning import warn_user


def all_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name, each once."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


@contextmanager
def as_in_training(module: nn.Module) -> Iterator[None]:
    """Let a module be in training mode, with gradients, whatever is evaluated."""
    modes = {each: each.training for each in module.modules()}
    try:
        with torch.enable_grad():
            module.train()
            yield
    finally:
        for each, was in modes.items():
            each.training = was


def give_memory(module: nn.Module) -> dict[str, int]:
    """Give tensors on the meta device memory that nothing has written to; return their versions by name."""
    named = {name: tensor for name, tensor in all_tensors(module).items() if tensor.is_meta}
    _replace(module, {id(tensor): _like(tensor, "cpu") for tensor in named.values()})
    given = all_tensors(module)
    return {name: given[name]._version for name in named}


def release_others(module: nn.Module, own: Collection[str]) -> None:
    """Move all but these tensors to the meta device; warn if something still refers to one of them."""
    storages = _release(module, own)
    if held := sum(nbytes for storage, nbytes in storages.items() if not storage.expired()):
        warn_user(
            f"{held} bytes of parameters of other stages are still referred to, and don't count in the budget of this "
            "rank; make the optimizer of pipe.parameters() after prepare(), and keep no other reference to them"
        )


def warn_unwritten(module: nn.Module, own: Collection[str], versions: Mapping[str, int]) -> None:
    """Warn if some of these tensors have no values, since nothing has written to them after `give_memory`."""
    named = all_tensors(module)
    missing = [name for name, version in versions.items() if name in own and named[name]._version == version]
    if missing:
        warn_user(
            f"{len(missing)} parameters and buffers were made on the meta device and have no values yet, the first is "
            f"{missing[0]}: give them with pipe.load_state_dict(...), or with torch.nn.init"
        )


def _release(module: nn.Module, own: Collection[str]) -> dict[StorageWeakRef, int]:
    """Return the storages of the tensors that were moved to the meta device."""
    named = all_tensors(module)
    kept = {named[name].untyped_storage()._cdata for name in own}
    others = [tensor for tensor in named.values() if tensor.untyped_storage()._cdata not in kept]
    _replace(module, {id(tensor): _like(tensor, "meta") for tensor in others})
    storages = [tensor.untyped_storage() for tensor in others if not tensor.is_meta]
    return {StorageWeakRef(storage): storage.nbytes() for storage in storages}


def _like(tensor: Tensor, device: str) -> Tensor:
    """Return a tensor of the same class and layout, with memory that is not written to."""
    empty = torch.empty_like(tensor, device=device, requires_grad=False)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _replace(module: nn.Module, new: Mapping[int, Tensor]) -> None:
    for each, key, tensor in list(_entries(module)):
        if id(tensor) in new:
            setattr(each, key, new[id(tensor)])


def _entries(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for each in module.modules():
        for tensors in (each._parameters, each._buffers):
            yield from ((each, key, tensor) for key, tensor in tensors.items() if tensor is not None)
