"""Insert gathers of updated parameters into forward, bucket by bucket.

                                 bucket_0_room = room(w)
    a = mm(x, w)                 bucket_0_sent = gather([w, b])
    b = add(a, b)          ->    bucket_0_here = gathered(bucket_0_sent, [w, b, bucket_0_room])
                                 a = mm(x, w)
                                 b = add(a, b)

`passes/order` decides where each begins and ends. Other ranks' elements are written to the parameters themselves, which
no op has read before. If nothing is pending, as in a first forward, the ops do nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from passes.ir.machine import CAST_WORKSPACE

from ...graph.captured import Captured
from ...graph.nodes import fake_result
from ...graph.rewrite import fake_mode
from ..optimizer import OSS
from .step_memory import gather_nbytes

OPS = torch.ops.memgraph


@dataclass(frozen=True)
class ForwardBucket:
    """A bucket of `size` elements of the named parameters; its gather takes `room` bytes of workspace."""

    bucket: int
    names: tuple[str, ...]
    size: int
    room: int


def forward_buckets(oss: OSS, named: Mapping[str, Tensor]) -> list[ForwardBucket]:
    """Return the buckets that a forward of the named parameters may gather: all their parameters are among these, and a
    step updates some."""
    oss.refresh_views()
    if oss.gather_mode != "forward" or oss.comm.is_alone:
        return []
    names, parameters, buckets = {p: name for name, p in named.items()}, oss.layout.parameters, []
    for views in oss.layout.buckets:
        bucket = views.bucket
        owned = [parameters[item] for item in bucket.params if parameters[item].numel()]
        is_updated = views.number in oss.pending_gathers.ever or oss.layout.is_trained(views)
        if owned and is_updated and names.keys() >= set(owned):
            size = bucket.shard_size * (oss.comm.ranks if bucket.owner is None else 1)
            room = gather_nbytes(oss, views) + CAST_WORKSPACE * (oss.comm.wire is not None)
            buckets.append(ForwardBucket(views.number, tuple(names[parameter] for parameter in owned), size, room))
    return buckets


def insert_all_gathers(captured: Captured, buckets: Sequence[ForwardBucket]) -> Captured:
    """Return the step that gathers these buckets in forward; its graph is changed in place."""
    graph = captured.graph.graph
    placeholders = graph.find_nodes(op="placeholder")
    of = {role.name: node for role, node in zip(captured.inputs, placeholders, strict=True) if role.kind == "parameter"}
    mode = fake_mode(graph)

    def add(op: torch._ops.OpOverload, name: str, *args: object) -> fx.Node:
        node = graph.create_node("call_function", op, args, name=name)  # type: ignore[arg-type]
        node.meta = {"phase": "forward", "where": ""}
        node.meta["val"] = fake_result(node, mode)
        return node

    with graph.inserting_before(placeholders[-1].next):
        for one in buckets:
            name, owned = f"bucket_{one.bucket}", [of[name] for name in one.names]
            room = [add(OPS.room.default, f"{name}_coming", owned[0], one.room)] if one.room else []
            sent = add(OPS.gather.default, f"{name}_sent", owned, one.bucket, one.size)
            add(OPS.gathered.default, f"{name}_here", sent, [*owned, *room], one.bucket)
    return replace(captured, gathers=frozenset(one.bucket for one in buckets))
