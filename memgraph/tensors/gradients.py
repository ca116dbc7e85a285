"""The gradients that parameters have.

w.grad = g;  v = 2 * w   ->   existing_gradients([w, v]) yields g, and leaves out v, which is no leaf
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor


def existing_gradients(parameters: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the gradients that exist.

    Autograd keeps those of leaves alone. `torch.func.functional_call` puts other tensors in the places of parameters.
    """
    for parameter in parameters:
        if parameter.is_leaf and parameter.grad is not None:
            yield parameter.grad
