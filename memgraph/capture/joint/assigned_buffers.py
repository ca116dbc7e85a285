"""Find the buffers in whose place forward puts another tensor.

self.running = 0.9 * self.running    ->   {place of running: its new value}, which the graph copies into the buffer
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from ...errors import CaptureError
from ...graph.captured import Input


def assigned_buffers(
    module: nn.Module, traced: Mapping[str, Tensor], roles: Sequence[Input], shapes: Mapping[str, torch.Size]
) -> dict[int, Tensor]:
    """Return these tensors by the positions of the buffers.

    Args:
        traced: the parameters and buffers that forward was given.
        roles: of these.
        shapes: of the buffers before forward.
    """
    inputs, found = set(map(id, traced.values())), dict[int, Tensor]()
    for place, (path, before) in enumerate(traced.items()):
        owner, _, name = path.rpartition(".")
        assigned = getattr(module.get_submodule(owner), name, None)
        if roles[place].kind == "buffer":
            _refuse_resized(roles[place], before, shapes[path])
        if assigned is not before:
            found[place] = _assignable(roles[place], before, assigned)
    for path, buffer in module.named_buffers(remove_duplicate=False):
        if path not in shapes:
            raise CaptureError(
                f"forward registers the buffer {path}: register it in __init__, or run the plain module once "
                "before it is compiled"
            )
        if path not in traced and isinstance(buffer, FakeTensor) and id(buffer) not in inputs:
            raise CaptureError(f"forward assigns to {path}, a second name of a buffer: change it in place")
    return found


def _refuse_resized(role: Input, buffer: Tensor, before: torch.Size) -> None:
    if buffer.shape != before:
        raise CaptureError(
            f"forward gives {role.label} the shape {tuple(buffer.shape)}, where it was {tuple(before)}, as the "
            "observers of quantization-aware training do in their first call: run the plain module once before it is "
            "compiled, or given to a trainer"
        )


def _assignable(role: Input, before: Tensor, assigned: object) -> Tensor:
    """Return the tensor that was assigned to a buffer, if copying it into the buffer is the same."""
    if role.kind == "parameter" or not isinstance(assigned, Tensor):
        raise CaptureError(
            f"forward, or a wrapper around the module such as FullyShardedDataParallel, puts a "
            f"{type(assigned).__name__} in the place of {role.label}, as no captured step can"
        )
    if (assigned.shape, assigned.dtype, assigned.device) != (before.shape, before.dtype, before.device):
        raise CaptureError(
            f"forward assigns {assigned.dtype} {tuple(assigned.shape)} to {role.label}, which is {before.dtype} "
            f"{tuple(before.shape)}; a captured step can only give it a tensor of its own dtype and shape"
        )
    return assigned
