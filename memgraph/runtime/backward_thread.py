"""Run a function in the thread in which autograd runs backward on a device.

    run_in_backward(lambda: recorder.record(half), cuda)     ->   recorded where backward will run, and has run before

cuBLAS and cuDNN keep handles and plans for each thread, and make them at the first use. A CUDA graph can't be recorded
while they do. On a CPU that thread is the caller's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def run_in_backward(run: Callable[[], T], device: torch.device) -> T:
    """Call a function in the thread of a device's backward, and return its result."""
    results: list[T] = []
    with torch.inference_mode(False), torch.enable_grad():
        leaf = torch.empty(0, device=device, requires_grad=True)
        output = _Call.apply(leaf, lambda: results.append(run()))  # type: ignore[no-untyped-call]
        torch.autograd.backward(output, torch.empty_like(output, requires_grad=False))
    return results[0]


class _Call(torch.autograd.Function):
    """The identity, whose backward calls a function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], object]) -> Tensor:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.call()
        return gradients[0], None
