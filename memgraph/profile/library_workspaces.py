"""Measure the workspaces that cuBLAS keeps on a GPU for each thread.

    ops: y = mm(x, w)   ->   libraries = buffer()  # makes libraries:69206016 | at cuBLAS;  y = mm(x, w)

A thread's first matrix product allocates them, in the caller's thread and in autograd's. This happens before anything
is measured. Otherwise they would count as the workspace of the first op.
"""

from __future__ import annotations

import contextlib
import os
import re
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
HOPPER, OTHER = 32 << 20, (8 << 20) + (128 << 10)  # bytes, where CUBLAS_WORKSPACE_CONFIG says nothing
LIGHT = 1024  # KiB of cuBLASLt's, where CUBLASLT_WORKSPACE_SIZE says nothing

_known: dict[torch.device, int] = {}
_here = threading.local()  # the devices and streams for which this thread has workspaces


def add_library_workspaces(trace: Trace, device: torch.device) -> Trace:
    """Add the libraries' workspaces to the step as a buffer."""
    return with_libraries(trace, libraries_nbytes(device))


def with_libraries(trace: Trace, nbytes: int) -> Trace:
    """Return the trace with a buffer of so many bytes; none for 0."""
    if not nbytes:
        return trace
    kept = Op(LIBRARIES, "buffer", makes=(Storage(LIBRARIES, nbytes),), holds=(LIBRARIES,), where="cuBLAS")
    return replace(trace, ops=(kept, *trace.ops))


def libraries_nbytes(device: torch.device) -> int:
    """Allocate the workspaces for this thread and autograd's, and return their bytes."""
    if device.type != "cuda":
        return 0
    places = vars(_here).setdefault("places", set())
    place = device, torch.cuda.current_stream(device).cuda_stream
    if device not in _known:
        # Some may be there already. None is ever freed here: CUDA graphs of the caller may have its address.
        _known[device] = max(_allocated_nbytes(device), 2 * _usual_nbytes(device))
    elif place not in places:
        _multiply(device)
    places.add(place)
    return _known[device]


def _usual_nbytes(device: torch.device) -> int:
    """Return the bytes that torch gives cuBLAS and cuBLASLt for a thread and a stream.

    Source: aten/src/ATen/cuda/CUDABlas.cpp and CublasHandlePool.cpp of torch 2.11; 33 MiB measured on an H100.
    """
    pairs = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    chosen = sum(int(size) * int(count) for size, count in pairs) << 10
    usual = HOPPER if torch.cuda.get_device_capability(device)[0] == 9 else OTHER
    return (chosen or usual) + (int(os.environ.get("CUBLASLT_WORKSPACE_SIZE", LIGHT)) << 10)


def _allocated_nbytes(device: torch.device) -> int:
    """Return the bytes that both threads' products leave allocated; 0 if they are there already."""
    _, allocated = measure_peak(partial(_multiply, device), device)
    return allocated.net if allocated is not None else 0


def _multiply(device: torch.device) -> None:
    """Multiply matrices in this thread and in autograd's."""
    torch.cuda.empty_cache()  # or a workspace may lie in a larger block, whose rest no other large request gets
    with (
        contextlib.suppress(RuntimeError),  # deterministic algorithms forbid cuBLAS without a fixed workspace
        torch.inference_mode(False), torch.enable_grad(), torch._C._DisableAutocast(),
    ):  # fmt: skip
        _Products.apply(torch.zeros(1, device=device, requires_grad=True)).backward()  # type: ignore[no-untyped-call]


class _Products(torch.autograd.Function):
    """The identity, with a product by cuBLAS and one by cuBLASLt in forward and in backward."""

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
