"""Wrappers that train a module over ranks: refused inside of a compiled module, and counted around it.

    memgraph.compile(DistributedDataParallel(net), budget)   ->   TypeError: ... compile the module in it, ...
    DistributedDataParallel(memgraph.compile(net, budget))   ->   its buckets count: as many bytes as net's gradients
    fully_shard(memgraph.compile(block, budget))             ->   its shards and buffers count

They exchange gradients or parameters by hooks and Python code around each call, which a captured step does not contain.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import UnplannedError

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
    ("torch.distributed._composable.replicate", "DDP", AVERAGED),
    ("torch.distributed.fsdp", "FullyShardedDataParallel", SHARDED),
    ("torch.distributed.fsdp", "FSDPModule", SHARDED),
)
# How often the parameters' bytes are taken by one around a module, at most: shards, the flat gradients that it reduces,
# what it receives, and gloo's copy.
SHARDED_SETS = 3
LISTED = 32  # bytes for each parameter in its buckets: which took part


def describe_wrapper(part: nn.Module) -> str:
    """Say what kind of wrapper a part of a module is, and what to do; empty if it is none."""
    for place, name, why in WRAPPERS:
        if isinstance(part, _class(place, name)):
            return f"is a {type(part).__name__}, which {why}"
    return ""


def refuse_wrapped(name: str, part: nn.Module) -> None:
    """
    Raises:
        UnplannedError: a part of a module, called `name`, is a wrapper.
    """
    if wrapper := describe_wrapper(part):
        raise UnplannedError(f"{name} {wrapper}")


class OuterWrapper:
    """The wrapper around a compiled module, as its calls show it."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._averaging: Callable[[], DistributedDataParallel | None] = lambda: None

    @property
    def averages(self) -> bool:
        """Return True if one averages the gradients of this call, or of one before."""
        calling = DistributedDataParallel._get_active_ddp_module()  # that of `replicate`, too
        if calling is not None and calling is not self._averaging():
            self._averaging = weakref.ref(calling)
        return self._averaging() is not None

    @property
    def shards(self) -> bool:
        """Return True if one gathers the module's parameters before each call."""
        return isinstance(self.module, _class("torch.distributed.fsdp", "FSDPModule"))

    @property
    def nbytes(self) -> int:
        """The bytes that it holds beside parameters and gradients."""
        own, wrapper = list(self.module.parameters()), self._averaging() if self.averages else None
        nbytes = SHARDED_SETS * sum(parameter.nbytes for parameter in own) if self.shards else 0
        if wrapper is None:
            return nbytes
        wrapped = set(map(id, wrapper.parameters()))
        # With views of buckets for gradients, those that exist are in the buckets.
        views = wrapper.gradient_as_bucket_view
        return nbytes + sum(
            parameter.nbytes + LISTED
            for parameter in own
            if id(parameter) in wrapped and parameter.requires_grad and not (views and parameter.grad is not None)
        )


def _class(place: str, name: str) -> Any:
    return getattr(sys.modules.get(place), name, ())
