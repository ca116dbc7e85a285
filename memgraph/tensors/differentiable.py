"""Tensors through which autograd passes a gradient.

y = linear(x)                          ->   it does
with torch.no_grad(): v = y[:, 0]      ->   it does not, although v.requires_grad is True: v has no grad_fn
"""

from __future__ import annotations

from torch import Tensor


def is_differentiable(tensor: Tensor) -> bool:
    """Return True if autograd passes gradients through the tensor, or to it."""
    return tensor.requires_grad and not is_cut_off(tensor)


def is_cut_off(tensor: Tensor) -> bool:
    """Return True for a view that was made without gradients of a tensor that has them."""
    return tensor.requires_grad and tensor._is_view() and tensor.grad_fn is None
