"""The optimizer's part in a call's key: with other groups a step takes more, and other states live far.

AdamW of two groups   ->   ((id(w1), id(w2)), (id(b1),), ())
"""

from __future__ import annotations

import torch
from torch import Tensor

from .oss import OSS


def groups_of(optimizer: torch.optim.Optimizer | None) -> tuple[tuple[int, ...], ...]:
    """Return who is in each of the optimizer's groups: with another one it takes more, and other states live far.  And
    what forward gathers of what is frozen, and which of that has states."""
    if optimizer is None:
        return ()
    found = tuple(tuple(map(id, group["params"])) for group in optimizer.param_groups)
    if isinstance(optimizer, OSS):
        return *found, optimizer.awaited.frozen, optimizer.updates.rested
    return *found, tuple(id(p) for p in optimizer.state if isinstance(p, Tensor) and not p.requires_grad)
