"""Let backward itself sum gradients over the ranks, bucket by bucket, and hand out this rank's part of each sum.

    dv = mm(x, d)                          dv = mm(x, d)
    db = sum(d)                            db = sum(d)
    return dv, db                  ->      bucket_0 = pack([dv, db])
                                           bucket_0_part = reduce_scatter(bucket_0)
                                           bucket_0_shard = reduced(bucket_0_part, bucket_0)
                                           return bucket_0_shard

Where an exchange begins and ends is the text's affair: see `passes/order/comm_order.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from ...graph.captured import Captured, Output
from ...graph.nodes import fake_result, returned_values
from ...graph.rewrite import fake_mode
from ..sharded_grads import GradBucket, Stretch
from .packing import PACKING

OPS = torch.ops.memgraph


def insert_reduce_scatters(captured: Captured, parcels: Sequence[GradBucket]) -> Captured:
    """The step that sums the gradients of these parcels over all ranks, as far as it makes them.

    The graph is changed in place.
    """
    graph = captured.graph.graph
    output, handed = graph.output_node(), returned_values(graph)
    made = {role.name: node for role, node in zip(captured.outputs, handed, strict=True) if role.kind == "gradient"}
    gone = {stretch.name for parcel in parcels for stretch in parcel.stretches} & made.keys()
    rest = [i for i, role in enumerate(captured.outputs) if role.kind != "gradient" or role.name not in gone]
    sent = [parcel for parcel in parcels if any(stretch.name in made for stretch in parcel.stretches)]
    with graph.inserting_before(output):
        writer = _Writer(graph, fake_mode(graph), made)
        shards = [writer.exchange(parcel) for parcel in sent]
    output.args = ((*(handed[i] for i in rest), *shards),)
    output.meta["kinds"] = (*(output.meta["kinds"][i] for i in rest), *("shard" for _ in sent))
    outputs = (*(captured.outputs[i] for i in rest), *(Output("shard", index=parcel.bucket) for parcel in sent))
    return replace(captured, outputs=outputs, reduced=tuple(name for name in made if name in gone))


class _Writer:
    def __init__(self, graph: fx.Graph, mode: FakeTensorMode, made: Mapping[str, fx.Node]) -> None:
        self.graph, self.mode, self.made = graph, mode, made

    def exchange(self, parcel: GradBucket) -> fx.Node:
        """This rank's part of a parcel."""
        name, there = f"bucket_{parcel.bucket}", [one for one in parcel.stretches if one.name in self.made]
        if (only := parcel.stretches[0]).end - only.begin == parcel.size:
            sent = self._node(OPS.stretch.default, name, self.made[only.name], only.begin, only.end)
        else:
            parts = [self._piece(one) for one in there if one.end > one.begin or len(there) == 1]
            begins = [one.at for one in there if one.end > one.begin or len(there) == 1]
            sent = self._node(PACKING.pack.default, name, parts, begins, parcel.size)
        room = self._node(OPS.room.default, f"{name}_room", sent, parcel.room)
        part = self._node(OPS.reduce_scatter.default, f"{name}_part", sent, room, parcel.bucket, parcel.part)
        return self._node(OPS.reduced.default, f"{name}_shard", part, sent, room, parcel.bucket)

    def _piece(self, stretch: Stretch) -> fx.Node:
        gradient = self.made[stretch.name]
        if stretch.end - stretch.begin == gradient.meta["val"].numel():
            return gradient
        return self._node(PACKING.piece.default, f"{gradient.name}_piece", gradient, stretch.begin, stretch.end)

    def _node(self, target: Any, name: str, *args: Any) -> fx.Node:
        node = self.graph.create_node("call_function", target, args, name=name)
        node.meta = {"phase": "backward", "where": ""}
        node.meta["val"] = fake_result(node, self.mode)
        return node
