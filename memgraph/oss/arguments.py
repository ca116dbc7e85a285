"""What `OSS` is given, refused where nothing can be made of it.

group=None               ->   all ranks, if there is a process group
gradients="averaged"     ->   ShardError: gradients='averaged'; give one of 'average', 'same'
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import optim

from ..errors import ShardError

GRADIENTS = ("average", "same")
GATHERS = ("step", "forward")


def ready(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The ranks to spread over; all of them if None.

    Raises:
        ShardError: there is no process group, or this rank is not in it.
    """
    if not dist.is_available() or not dist.is_initialized():
        call = 'torch.distributed.init_process_group("gloo"), or "nccl" with GPUs'
        raise ShardError(f"there is no process group to spread over: start with torchrun, and first call {call}")
    try:
        is_out = dist.get_rank(group) < 0
    except (TypeError, ValueError) as error:  # torch's own, of what it does not know
        found = "torch.distributed.new_group(ranks), which all ranks have to call"
        raise ShardError(f"group={group!r} is no process group that there is now; make one with {found}") from error
    if is_out:
        raise ShardError(f"rank {dist.get_rank()} is not in the group; build the optimizer on the group's ranks alone")
    ready = dist.group.WORLD if group is None else group
    assert ready is not None
    return ready


def refuse_arguments(kind: object, gradients: object, gather: object, wire: torch.dtype | None, nbytes: object) -> None:
    """
    Raises:
        ShardError: one of them is none of those that there are, or two can't be together.
    """
    if not isinstance(kind, type) or not issubclass(kind, optim.Optimizer):
        found = repr(kind) if isinstance(kind, str | type) else f"a {type(kind).__name__}"
        example = "OSS(params, torch.optim.AdamW, lr=3e-4)"
        raise ShardError(f"optim is {found}; give the class of an optimizer, and its options by name: {example}")
    if gradients not in GRADIENTS:
        raise ShardError(f"gradients={gradients!r}; give one of {', '.join(map(repr, GRADIENTS))}")
    if gather not in GATHERS:
        raise ShardError(f"gather={gather!r}; give one of {', '.join(map(repr, GATHERS))}")
    if not isinstance(nbytes, int) or isinstance(nbytes, bool) or nbytes < 1:
        raise ShardError(f"bucket_bytes={nbytes!r}; give a number of bytes, as 25 << 20")
    if gather == "forward" and (issubclass(kind, optim.LBFGS) or wire is torch.float16):
        what = "float16 may have to be sent anew" if wire is torch.float16 else "LBFGS asks for losses in its step"
        raise ShardError(f'gather="forward" leaves the gathering to the next forward, and {what}; give gather="step"')
