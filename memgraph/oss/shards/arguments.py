"""What `OSS` is given, as values of its own; refused where nothing can be made of it.

group=None               ->   all ranks, if there is a process group
gradients="averaged"     ->   ShardError: gradients='averaged'; give one of 'average', 'same'
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import optim

from ...errors import ShardError
from ...options.argument_rules import SHARDED_RULES, check_argument


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


def arguments(
    kind: object, gradients: object, gather: object, wire_dtype: object, bucket_bytes: object
) -> dict[str, Any]:
    """What they mean, by their names; `optim` is the kind.

    Raises:
        ShardError: one of them is none of those that there are, or two can't be together.
    """
    given = {"optim": kind, "gradients": gradients, "gather": gather}
    given |= {"wire_dtype": wire_dtype, "bucket_bytes": bucket_bytes}
    try:
        own = {name: check_argument(name, value, SHARDED_RULES) for name, value in given.items()}
    except (TypeError, ValueError) as error:
        raise ShardError(str(error)) from None
    is_rounded = own["wire_dtype"] is torch.float16
    if own["gather"] == "forward" and (issubclass(own["optim"], optim.LBFGS) or is_rounded):
        what = "float16 may have to be sent anew" if is_rounded else "LBFGS asks for losses in its step"
        raise ShardError(f'gather="forward" leaves the gathering to the next forward, and {what}; give gather="step"')
    return own
