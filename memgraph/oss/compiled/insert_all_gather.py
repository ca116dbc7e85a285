"""Let forward itself gather what other ranks have updated of the parameters, bucket by bucket.

                                 bucket_0_room = room(w)
    a = mm(x, w)                 bucket_0_sent = gather([w, b])
    b = add(a, b)          ->    bucket_0_here = gathered(bucket_0_sent, [w, b, bucket_0_room])
                                 a = mm(x, w)
                                 b = add(a, b)

Where each begins and ends is the text's affair: see `passes/order/gathers.py`.  What comes is written to the parameters
themselves, which so far no op has read; where nothing is awaited, as in a first forward, the ops do nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from passes.ir.wire import WORKSPACE

from ...graph.captured import Captured
from ...graph.nodes import fake_result
from ...graph.rewrite import fake_mode
from ..optimizer import OSS
from .step_memory import gathered_nbytes

OPS = torch.ops.memgraph


@dataclass(frozen=True)
class Arrival:
    """A bucket of `size` elements of the parameters of these names, which takes `room` bytes until it has come."""

    bucket: int
    names: tuple[str, ...]
    size: int
    room: int


def arrivals(oss: OSS, named: Mapping[str, Tensor]) -> list[Arrival]:
    """What a forward that reads the parameters of these names may gather: the buckets that are all theirs, but for
    those that no step updates."""
    oss.follow()
    if oss.gathers != "forward" or oss.exchange.is_alone:
        return []
    names, parameters, found = {p: name for name, p in named.items()}, oss.pieces.parameters, []
    for i, laid in enumerate(oss.pieces.laid):
        bucket = laid.bucket
        there = [parameters[item] for item in bucket.items if parameters[item].numel()]
        if there and (i in oss.awaited.ever or oss.awaited.is_trained(i)) and names.keys() >= set(there):
            size = bucket.part * (oss.exchange.ranks if bucket.owner is None else 1)
            room = gathered_nbytes(oss, laid) + WORKSPACE * (oss.exchange.wire is not None)
            found.append(Arrival(i, tuple(names[parameter] for parameter in there), size, room))
    return found


def insert_all_gathers(captured: Captured, arriving: Sequence[Arrival]) -> Captured:
    """The step that gathers these parameters in forward.

    The graph is changed in place.
    """
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
        for one in arriving:
            name, owned = f"bucket_{one.bucket}", [of[name] for name in one.names]
            room = [add(OPS.room.default, f"{name}_coming", owned[0], one.room)] if one.room else []
            sent = add(OPS.gather.default, f"{name}_sent", owned, one.bucket, one.size)
            add(OPS.gathered.default, f"{name}_here", sent, [*owned, *room], one.bucket)
    return replace(captured, gathers=frozenset(one.bucket for one in arriving))
