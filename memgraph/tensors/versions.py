"""Whether tensors that backward will read have been changed in place, as autograd asks of those that it saves.

seen = [(w, version_of(w))];  w.add_(1);  refuse_changed(seen)   ->   RuntimeError
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


def version_of(tensor: Tensor) -> int:
    """How often it was changed in place; tensors made in inference mode don't count."""
    return 0 if tensor.is_inference() else tensor._version


def refuse_modified(seen: Iterable[tuple[Tensor, int]]) -> None:
    """Raise if a tensor is no longer of the version that was seen.

    Raises:
        RuntimeError: it has been changed in place.
    """
    for tensor, version in seen:
        if version_of(tensor) != version:
            raise RuntimeError(
                f"one of the variables needed for gradient computation, a tensor of shape {tuple(tensor.shape)}, has "
                f"been modified in place since forward (version {version_of(tensor)}, expected {version}); "
                "clone it before it is changed, or change it after backward"
            )
