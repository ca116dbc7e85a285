"""What is said when torch's allocator refuses a step on a GPU bytes that its plan counts on.

CUDA out of memory. Tried to allocate 20.00 MiB   ->   the same, with "... 412 MB lay free between blocks ..."

What a step asks for is within its budget, but memory is not all of one piece: beside the blocks that are given out
others lie free, none of which is large enough.  With `strict`, or a budget of nearly all of a device, that runs out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..report.report import Report

WAYS = (
    "start the process with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, with which blocks grow and hardly "
    "anything lies free between them, or allow the step more memory than it asks for"
)


@contextmanager
def explain_out_of_memory(report: Report, device: torch.device) -> Iterator[None]:
    """
    Raises:
        OutOfMemoryError: torch's own, with what the step was planned to take, and what is in the way.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        given, held = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        plan = f"the step was planned to take {report.peak} bytes at most, of a budget of {report.budget}"
        there = f"torch's allocator has given out {given} on {device}, and holds {held - given} more between those"
        raise torch.OutOfMemoryError(f"{error}\n{plan}; {there}: {WAYS}") from error
