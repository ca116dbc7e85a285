"""Refuse what forward, or a function's backward, puts into the `.grad` of an input: no captured step does.

    self.inner(x).square().mean().backward()    in forward                   ->    CaptureError
    weight.grad = computed                      in a function's backward     ->    CaptureError

What a function's backward adds to `.grad` by a `backward()` of its own is part of the step's gradients.
"""

from __future__ import annotations

from ...errors import CaptureError


def set_gradient_error(label: str, where: str) -> CaptureError:
    """Return the error for a gradient that `where` puts into a tensor."""
    return CaptureError(
        f"{where} sets the .grad of {label}, as no captured step can: compute gradients there with "
        "torch.autograd.grad, and let a function return those of its arguments"
    )
