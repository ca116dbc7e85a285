"""What a captured graph depends on: the key under which it may be used again.

model(x, mask=None)  ->  the call's structure and constants; shape, stride, dtype, device and requires_grad of every tensor;
                         every module's `training`; autocast and grad mode; which parameters are frozen, which have
                         gradients
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor, nn


def signature(module: nn.Module, spec: Hashable, leaves: Sequence[object]) -> Hashable:
    """The guard key of a call; equal keys may share a graph.  Leaves that are no tensors are in the key by type and
    value."""
    return (
        spec,
        tuple(_tensor(leaf) if isinstance(leaf, Tensor) else (type(leaf), leaf) for leaf in leaves),
        tuple(map(_tensor, module.parameters())),
        tuple(map(_tensor, module.buffers())),
        tuple(part.training for part in module.modules()),
        _modes(),
    )


def has_gradients(module: nn.Module) -> bool:
    """Whether gradients are there already, to which backward will add."""
    return any(parameter.grad is not None for parameter in module.parameters())


def _tensor(tensor: Tensor) -> Hashable:
    return (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)


def _modes() -> Hashable:
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return (
        tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds),
        torch.is_grad_enabled(),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
    )
