"""What stands in `.grad` while the gradient itself lies in parts on all ranks.

w.grad = ghost(w)     ->   NaN in every place, held once: torch refuses to clip it, to scale it, or to add to it

Whoever sets it to None or to zero is noticed.
"""

from __future__ import annotations

import torch
from torch import Tensor

MARK = "memgraph_ghost"


def placeholder_grad(parameter: Tensor) -> Tensor:
    """A gradient of this parameter that is not there."""
    found = parameter.detach().new_full((), torch.nan).expand(parameter.shape)
    setattr(found, MARK, found._version)
    return found


def is_placeholder(gradient: Tensor | None) -> bool:
    """Whether a gradient is one, be it written to or not."""
    return gradient is not None and hasattr(gradient, MARK)


def is_written(gradient: Tensor) -> bool:
    """Whether somebody has written to a ghost, which only zeroing does in general."""
    return bool(gradient._version != getattr(gradient, MARK))
