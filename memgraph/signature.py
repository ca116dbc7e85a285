"""What a captured graph depends on: the key under which it may be used again.

    model(x, mask=None)  ->  ((x's shape, strides, dtype, ...), None, every module's `training`, ..., grad mode)

In the key are the call's structure and constants; shape, strides, dtype, device and requires_grad of every tensor; the
plain attributes and the hooks of every submodule; autocast and grad mode.
"""

from __future__ import annotations

import types
from collections.abc import Hashable, Iterable, Sequence

import torch
from torch import Tensor, nn

from .shared import Shared

PLAIN = (bool, int, float, str, types.NoneType)


def signature(module: nn.Module, owned: Sequence[Tensor], spec: Hashable, leaves: Sequence[object]) -> Hashable:
    """The guard key of a call; equal keys may share a graph.  What is no tensor is in it by type and value.

    `owned` are the module's parameters and buffers.
    """
    return (
        spec,
        tuple(_tensor(leaf) if isinstance(leaf, Tensor) else _constant(leaf) for leaf in leaves),
        tuple(map(_tensor, owned)),
        tuple(map(is_watched, owned)),
        tuple(_python(part) for part in (*module.modules(), *([module._module] if isinstance(module, Shared) else []))),
        _modes(),
    )


def has_gradients(parameters: Iterable[Tensor]) -> bool:
    """Whether gradients are there already, to which backward will add."""
    return any(parameter.grad is not None for parameter in parameters)


def is_watched(parameter: Tensor) -> bool:
    """Whether somebody is told of the parameter's gradient, so that autograd itself has to accumulate it."""
    hooks = parameter._backward_hooks or parameter._post_accumulate_grad_hooks
    # A data-parallel wrapper's hooks on the accumulation can't be seen from here.
    return bool(hooks) or (torch.distributed.is_available() and torch.distributed.is_initialized())


def _python(part: nn.Module) -> Hashable:
    """What forward may read of a module besides its tensors: `training`, its other plain attributes, and its hooks."""
    attributes = tuple((name, value) for name, value in vars(part).items() if type(value) in PLAIN)
    hooks = (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks)
    return type(part), attributes, tuple(id(hook) for found in hooks for hook in found.values())


def _constant(leaf: object) -> Hashable:
    return type(leaf), repr(leaf) if isinstance(leaf, float | complex | slice) else leaf  # 0.0 == -0.0


def _tensor(tensor: Tensor) -> tuple[Hashable, ...]:
    return (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)


def _modes() -> Hashable:
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return (
        tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds),
        torch.is_grad_enabled(),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
    )
