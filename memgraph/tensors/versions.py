"""Detect in-place changes of tensors that backward will read, as autograd does for those that it saves.

seen = [(w, version_of(w))];  w.add_(1);  refuse_modified(seen)   ->   RuntimeError
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; 0 for tensors of inference mode."""
    return 0 if tensor.is_inference() else tensor._version


def refuse_modified(seen: Iterable[tuple[Tensor, int]]) -> None:
    """Raise if a tensor was changed in place since its version was read.

    Raises:
        RuntimeError: it was.
    """
    for tensor, version in seen:
        if version_of(tensor) != version:
            raise RuntimeError(
                f"one of the variables needed for gradient computation, a tensor of shape {tuple(tensor.shape)}, has "
                f"been modified in place since forward (version {version_of(tensor)}, expected {version}); "
                "clone it before it is changed, or change it after backward"
            )
