"""Refuse to compile modules that train what they wrap, and say what to compile instead.

    memgraph.compile(DistributedDataParallel(net), budget)   ->   TypeError: ... compile the module in it, ...
    memgraph.compile(a LightningModule, budget)              ->   RuntimeWarning: ... compile the network that it holds

The first kind exchanges gradients or parameters by hooks and Python code around each call, which a captured step does
not contain.  The second is trained by its `training_step`, which calls its parts, so that no call is planned.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from ..errors import UnplannedError
from ..system.user_warning import warn_user

AVERAGED = (
    "averages gradients over ranks by hooks that no captured step calls; compile the module in it, and wrap the "
    "result: DistributedDataParallel(memgraph.compile(net, budget)); or give optimizer=memgraph.OSS(...), which "
    "averages them inside the step"
)
SHARDED = (
    "gathers its parameters by hooks around each call, which no captured step runs; give the plain module, with "
    "optimizer=memgraph.OSS(...) to shard the optimizer's states over ranks"
)
# By the module of the class, which is imported if an instance exists.
WRAPPERS = (
    ("torch.nn.parallel.distributed", "DistributedDataParallel", AVERAGED),
    ("torch.distributed.fsdp", "FullyShardedDataParallel", SHARDED),
    ("torch.distributed.fsdp", "FSDPModule", SHARDED),
)


def refuse_wrapped(what: str, part: nn.Module) -> None:
    """
    Raises:
        UnplannedError: `part` is such a module; the message calls it `what`.
    """
    for place, name, why in WRAPPERS:
        kind: Any = getattr(sys.modules.get(place), name, ())
        if isinstance(part, kind):
            raise UnplannedError(f"{what} is a {type(part).__name__}, which {why}")


def warn_of_steps(model: nn.Module) -> None:
    """Warn if a training loop will not call the model itself: only such calls are planned."""
    if callable(getattr(model, "training_step", None)):
        warn_user(
            f"only calls of the compiled module are planned; {type(model).__name__}.training_step runs the plain "
            "one, outside of the budget: compile its network, as self.net = memgraph.compile(net, budget)"
        )
