"""What the libraries of a GPU keep there for themselves: workspaces of matrix products, one a thread, that stay.

    ops: y = mm(x, w)   ->   libraries = buffer()  # makes libraries:69206016 | at cuBLAS;  y = mm(x, w)

They come with a thread's first product: that of who calls, and that of autograd's own thread in backward.  So they are
had before anything is measured, or the op that happens to be first would seem to take them, and a step to leave what no
forecast knew of.  Not yet run on a GPU.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from passes import Op, Storage, Trace
from passes.cuda_graph_memory import LIBRARIES

from .memory_meter import measure_peak

SIDE = 16  # of the matrices that are multiplied

_known: dict[torch.device, int] = {}
_here = threading.local()  # where this thread has its workspaces: devices, and streams of theirs


def add_library_workspaces(trace: Trace, device: torch.device) -> Trace:
    """The step with what libraries keep on the device among what is there throughout."""
    if not (nbytes := libraries_nbytes(device)):
        return trace
    kept = Op(LIBRARIES, "buffer", makes=(Storage(LIBRARIES, nbytes),), holds=(LIBRARIES,), where="cuBLAS")
    return replace(trace, ops=(kept, *trace.ops))


def libraries_nbytes(device: torch.device) -> int:
    """The bytes that libraries keep on a device for this thread and autograd's, which have them from now on."""
    if device.type != "cuda":
        return 0
    there = vars(_here).setdefault("there", set())
    place = device, torch.cuda.current_stream(device).cuda_stream
    if device not in _known:
        # They may be there already, and nobody tells how large they are.
        torch._C._cuda_clearCublasWorkspaces()
        _, allocated = measure_peak(partial(_multiply, device), device)
        _known[device] = allocated.net if allocated is not None else 0
    elif place not in there:
        _multiply(device)
    there.add(place)
    return _known[device]


def _multiply(device: torch.device) -> None:
    """Have this thread multiply, and autograd's."""
    with (
        contextlib.suppress(RuntimeError),  # nobody multiplies where it is forbidden: where all is to be deterministic
        torch.inference_mode(False), torch.enable_grad(), torch._C._DisableAutocast(),
    ):  # fmt: skip
        _Products.apply(torch.zeros(1, device=device, requires_grad=True)).backward()  # type: ignore[no-untyped-call]


class _Products(torch.autograd.Function):
    """The identity, in each direction of which there is a product by cuBLAS, and one by cuBLASLt."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        _products(x.device)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        _products(gradients[0].device)
        return gradients[0]


def _products(device: torch.device) -> None:
    matrix = torch.zeros(SIDE, SIDE, device=device)
    torch.mm(matrix, matrix)
    torch.addmm(matrix[0], matrix, matrix)
