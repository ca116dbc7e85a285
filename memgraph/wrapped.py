"""Modules that train a module over several processes -> a TypeError that says how to have both.

    memgraph.compile(DistributedDataParallel(net), budget)   ->   TypeError: ... compile model.module instead

They exchange gradients or parameters by hooks and by Python that runs around every call, and a captured step has none.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

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
