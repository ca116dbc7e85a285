"""Modules that see to the training of what they hold, and are not to be compiled themselves -> what to compile instead.

    memgraph.compile(DistributedDataParallel(net), budget)   ->   TypeError: ... compile the module in it, ...
    memgraph.compile(a LightningModule, budget)              ->   RuntimeWarning: ... compile the network that it holds

The first kind exchanges gradients or parameters by hooks and by Python that runs around every call, and a captured step
has none.  The second is called by its `training_step`, which calls its parts, and so never comes to a plan.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from ..system.user_warning import warn_user

AVERAGED = (
    "averages gradients over ranks by hooks that no captured step calls; compile the module in it, and wrap what "
    "you get: DistributedDataParallel(memgraph.compile(net, budget)); or give optimizer=memgraph.OSS(...), which "
    "averages them inside of the step"
)
SHARDED = (
    "fetches its parameters by hooks around each call, which no captured step runs; give the plain module, with "
    "optimizer=memgraph.OSS(...) to spread the optimizer's states over ranks"
)
# By the module that has the class, which is there if somebody has made such a thing.
WRAPPERS = (
    ("torch.nn.parallel.distributed", "DistributedDataParallel", AVERAGED),
    ("torch.distributed.fsdp", "FullyShardedDataParallel", SHARDED),
    ("torch.distributed.fsdp", "FSDPModule", SHARDED),
)


def refuse_wrapped(what: str, part: nn.Module) -> None:
    """
    Raises:
        TypeError: `part`, which a caller knows as `what`, is such a module.
    """
    for place, name, why in WRAPPERS:
        kind: Any = getattr(sys.modules.get(place), name, ())
        if isinstance(part, kind):
            raise TypeError(f"{what} is a {type(part).__name__}, which {why}")


def warn_of_steps(model: nn.Module) -> None:
    """Warn if calls of the model itself, which alone are planned, are not what a training loop will make."""
    if callable(getattr(model, "training_step", None)):
        warn_user(
            f"only calls of the compiled module are planned; {type(model).__name__}.training_step runs the plain "
            "one, outside of the budget: compile its network, as self.net = memgraph.compile(net, budget)"
        )
