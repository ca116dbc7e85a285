"""Insert reduce-scatters of gradients into backward, bucket by bucket; backward returns this rank's shards.

    dv = mm(x, d)                          dv = mm(x, d)
    db = sum(d)                            db = sum(d)
    return dv, db                  ->      bucket_0 = pack([dv, db], [0, 4], 8)
                                           bucket_0_part = reduce_scatter(bucket_0)
                                           bucket_0_shard = reduced(bucket_0_part, bucket_0)
                                           return bucket_0_shard

`passes/order` decides where each begins and ends. Packing gradients is an op, so that its time can be measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode

from ...graph.captured import Captured, Output
from ...graph.define_op import define_op
from ...graph.nodes import fake_result, returned_values
from ...graph.ops import stretch
from ...graph.rewrite import fake_mode
from ..sharded_grads import GradBucket, Stretch

_library = torch.library.Library("memgraph_oss", "DEF")


def copy_stretch(x: Tensor, begin: int, end: int) -> Tensor:
    """Copy a stretch of a gradient, so that the rest of it can be freed."""
    return stretch(x, begin, end).clone()


def pack(parts: Sequence[Tensor], begins: Sequence[int], size: int) -> Tensor:
    """Copy gradients into one tensor of `size` elements, each to its offset, with zeros between them."""
    packed, end = parts[0].new_empty(size), 0
    for part, begin in zip(parts, begins, strict=True):
        packed[end:begin].zero_()
        end = begin + part.numel()
        packed[begin:end].copy_(stretch(part, 0, part.numel()))
    packed[end:].zero_()
    return packed


def _fake_pack(parts: Sequence[Tensor], begins: Sequence[int], size: int) -> Tensor:
    return parts[0].new_empty(size)


define_op(_library, "piece(Tensor x, int begin, int end) -> Tensor", copy_stretch, copy_stretch)
define_op(_library, "pack(Tensor[] parts, int[] begins, int size) -> Tensor", pack, _fake_pack)

PACKING = torch.ops.memgraph_oss
OPS = torch.ops.memgraph


def insert_reduce_scatters(captured: Captured, buckets: Sequence[GradBucket]) -> Captured:
    """Return the step that reduces the gradients in these buckets; its graph is changed in place."""
    graph = captured.graph.graph
    output, returned = graph.output_node(), returned_values(graph)
    grads = {role.name: node for role, node in zip(captured.outputs, returned, strict=True) if role.kind == "gradient"}
    reduced = {one.name for bucket in buckets for one in bucket.stretches} & grads.keys()
    rest = [i for i, role in enumerate(captured.outputs) if role.kind != "gradient" or role.name not in reduced]
    sent = [bucket for bucket in buckets if any(one.name in grads for one in bucket.stretches)]
    with graph.inserting_before(output):
        writer = _Writer(graph, fake_mode(graph), grads)
        shards = [writer.reduce(bucket) for bucket in sent]
    output.args = ((*(returned[i] for i in rest), *shards),)
    output.meta["kinds"] = (*(output.meta["kinds"][i] for i in rest), *("shard" for _ in sent))
    outputs = (*(captured.outputs[i] for i in rest), *(Output("shard", index=bucket.bucket) for bucket in sent))
    return replace(captured, outputs=outputs, reduced=tuple(name for name in grads if name in reduced))


class _Writer:
    def __init__(self, graph: fx.Graph, mode: FakeTensorMode, grads: Mapping[str, fx.Node]) -> None:
        self.graph, self.mode, self.grads = graph, mode, grads

    def reduce(self, bucket: GradBucket) -> fx.Node:
        name, present = f"bucket_{bucket.bucket}", [one for one in bucket.stretches if one.name in self.grads]
        if (only := bucket.stretches[0]).end - only.begin == bucket.size:
            sent = self._node(OPS.stretch.default, name, self.grads[only.name], only.begin, only.end)
        else:
            stretches = [one for one in present if one.end > one.begin or len(present) == 1]
            parts, begins = list(map(self._part, stretches)), [one.at for one in stretches]
            sent = self._node(PACKING.pack.default, name, parts, begins, bucket.size)
        room = self._node(OPS.room.default, f"{name}_room", sent, bucket.room)
        part = self._node(OPS.reduce_scatter.default, f"{name}_part", sent, room, bucket.bucket, bucket.part)
        return self._node(OPS.reduced.default, f"{name}_shard", part, sent, room, bucket.bucket)

    def _part(self, one: Stretch) -> fx.Node:
        grad = self.grads[one.name]
        if one.end - one.begin == grad.meta["val"].numel():
            return grad
        return self._node(PACKING.piece.default, f"{grad.name}_piece", grad, one.begin, one.end)

    def _node(self, target: Any, name: str, *args: Any) -> fx.Node:
        node = self.graph.create_node("call_function", target, args, name=name)
        node.meta = {"phase": "backward", "where": ""}
        node.meta["val"] = fake_result(node, self.mode)
        return node
