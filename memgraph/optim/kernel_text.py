"""Tell optimizers apart by what may decide which kernels their steps run.

Adam, lr 0.1, betas (0.9, 0.99), foreach False   ->   the same as with another lr, and not as with foreach True
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn, optim

from .elementwise import ELEMENTWISE
from .trial_copy import is_left_out

PLAIN_TYPES = int, float, complex, str, bytes, type(None), torch.dtype, torch.device


def kernel_text(optimizer: torch.optim.Optimizer) -> str:
    """Return what may decide which kernels a step runs, as far as it is plain: options, and attributes of a class."""
    options = [kernel_options(group) for group in optimizer.param_groups]
    return repr((options, {} if type(optimizer) in ELEMENTWISE else plain_attributes(optimizer)))


def kernel_options(group: Mapping[str, object]) -> dict[str, object]:
    """Reduce a group's options to what may decide which kernels run."""
    return {key: _kernel_option(value) for key, value in group.items() if key != "params"}


def _kernel_option(option: object) -> object:
    if isinstance(option, tuple | list):
        return [_kernel_option(item) for item in option]
    if isinstance(option, bool | str) or option is None:
        return option
    return option != 0 if isinstance(option, int | float) else type(option).__name__


def plain_attributes(optimizer: optim.Optimizer) -> dict[str, Any]:
    """Return the plain values that an optimizer keeps beside its groups and states."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name != "defaults" and not is_left_out(name) and _is_plain(value)
    }


def _is_plain(value: object) -> bool:
    if isinstance(value, Mapping):
        return type(value) is dict and all(map(_is_plain, (*value, *value.values())))
    if isinstance(value, list | tuple | set):
        return type(value) in (list, tuple, set) and all(map(_is_plain, value))
    if isinstance(value, Tensor):
        return value.dim() == 0 and not isinstance(value, nn.Parameter) and not value.requires_grad
    return isinstance(value, PLAIN_TYPES)
