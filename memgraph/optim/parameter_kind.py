"""Parameters that an optimizer updates alike: one of each kind is enough to measure.

f32[768, 768] of group 0, twelve times   ->   one kind
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..system.device import CPU


@dataclass(frozen=True)
class ParameterKind:
    """Parameters that are updated alike."""

    group: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, group: int, parameter: Tensor) -> ParameterKind:
        """Return the kind of a parameter; one of device meta is tried on the CPU."""
        device = CPU if parameter.is_meta else parameter.device
        return cls(group, tuple(parameter.shape), parameter.dtype, device)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def within(self, elements: int) -> ParameterKind:
        """Return the kind with its largest sizes halved until so few elements are left."""
        shape = [*self.shape]
        while math.prod(shape) > elements:
            i = shape.index(max(shape))
            shape[i] = (shape[i] + 1) // 2
        return replace(self, shape=tuple(shape))

    def place(self, parameters: Mapping[int, Tensor]) -> int | None:
        """Return the place of a parameter of this kind, or else of one that is most alike; None without any."""
        alike = {i: (tuple(p.shape) != self.shape, p.dim() != len(self.shape), i) for i, p in parameters.items()}
        return min(alike, key=alike.__getitem__, default=None)

    def sample(self) -> Tensor:
        """Make up a parameter with a gradient."""
        parameter = torch.zeros(self.shape, dtype=self.dtype, device=self.device, requires_grad=True)
        parameter.grad = torch.zeros_like(parameter)
        return parameter


def stepped_parameters(optimizer: torch.optim.Optimizer) -> list[list[Tensor]]:
    """Return the parameters of each group that are trained or have a state."""
    return [
        [p for p in group["params"] if may_be_stepped(p) or p in optimizer.state] for group in optimizer.param_groups
    ]


def may_be_stepped(parameter: Tensor) -> bool:
    """Return True if an update may find a gradient: a frozen parameter has none unless it exists already."""
    return parameter.requires_grad or parameter.grad is not None


def kinds_of(rows: Iterable[Iterable[Tensor]]) -> list[ParameterKind]:
    """Return the kind of each parameter of each group."""
    return [ParameterKind.of(i, parameter) for i, row in enumerate(rows) for parameter in row]
