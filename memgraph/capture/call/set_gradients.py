"""Refuse what forward, or a function's backward, puts into the `.grad` of an input: no captured step does.

    self.inner(x).square().mean().backward()    in forward                   ->    CaptureError
    weight.grad = computed                      in a function's backward     ->    CaptureError

What a function's backward adds to `.grad` by a `backward()` of its own is part of the step's gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...errors import CaptureError
from ...graph.captured import Input


def refuse_set_gradients(roles: Sequence[Input], values: Sequence[Tensor], where: str) -> None:
    """Raise if the trace has left a gradient in one of its inputs."""
    for role, value in zip(roles, values, strict=False):
        if value.is_leaf and value.grad is not None:
            raise set_gradient_error(role, where)


def set_gradient_error(role: Input, where: str) -> CaptureError:
    """Return the error for a gradient that `where` puts into an input."""
    return CaptureError(
        f"{where} sets the .grad of {role.label}, as no captured step can: compute gradients there with "
        "torch.autograd.grad, and let a function return those of its arguments"
    )
