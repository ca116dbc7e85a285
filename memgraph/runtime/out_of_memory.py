"""Explain an out-of-memory error of torch's allocator during a step on a GPU.

CUDA out of memory. Tried to allocate 20.00 MiB   ->   the same, with "... holds 412000000 more between those ..."

A step allocates no more than its budget, but memory is fragmented: the free blocks between allocated ones may all be
too small.  With `strict`, or a budget of nearly the whole device, the allocator then runs out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..report.report import Report

ADVICE = (
    "start the process with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, which lets blocks grow and leaves hardly "
    "any free memory between them, or give the process more memory than the step's budget"
)


@contextmanager
def explain_out_of_memory(report: Report, device: torch.device) -> Iterator[None]:
    """
    Raises:
        OutOfMemoryError: torch's own, with the planned bytes and those that the allocator holds.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        given, held = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        plan = f"the step was planned to take {report.peak} bytes at most, of a budget of {report.budget}"
        there = f"torch's allocator has given out {given} on {device}, and holds {held - given} more between those"
        raise torch.OutOfMemoryError(f"{error}\n{plan}; {there}: {ADVICE}") from error
