"""Checks of each op of a step: devices of its values, what it writes to, what workspace is assumed.

aten.add.Tensor(cuda f32[8], cpu f32[8])          ->   mixes cpu and cuda:0
aten.cudnn_batch_norm(x, ..., running_mean, ...)  ->   writes to running_mean and running_var, and runs once
aten._flash_attention_backward(...)               ->   its workspace is assumed to be 0, and its kernel takes one
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import fx
from torch._ops import OpOverload

from memgraph.graph.nodes import tensors, written_inputs
from memgraph.graph.summarize import Price
from memgraph.profile.op_profiler import is_view
from passes import Trace

# Kernels of CUDA that allocate while they run, by part of an op's name, with what they allocate: read in torch's
# sources. Prices that are measured have it; prices by roofline have what the profile or the guess says.
ALLOCATING = {
    "flash_attention_backward": "queries' gradient in float32, and a sum for each row",
    "efficient_attention_backward": "gradients in float32 where they are narrower, and a sum for each row",
    "cudnn_attention": "cuDNN's own",
    "convolution": "cuDNN's own, by algorithm",
    "_cudnn_rnn": "cuDNN's own, and packed weights",
    "cudnn_batch_norm": "cuDNN's own",
    "embedding_dense_backward": "sorted indices, and where each begins",
    "index_put": "sorted indices, if it accumulates",
    "_grouped_mm": "addresses and sizes of the groups",
    "native_layer_norm_backward": "sums of each block of rows",
    "cumsum": "sums of each block",
    "sort": "a copy, and positions",
    "topk": "a copy, and positions",
    "nonzero": "counts of each block",
}


INDEXING = ("aten.index", "aten.index_put", "aten._index_put_impl_")  # these copy indices from the host


def mixed_devices(graph: fx.Graph) -> list[str]:
    """Return the ops with tensors on several devices, numbers and indices aside."""
    found = []
    for node in _ops(graph):
        if str(node.target).rsplit(".", 1)[0] in INDEXING:
            continue
        values = [value for source in (*node.all_input_nodes, node) for value in tensors(source) if value.dim()]
        devices = sorted({str(value.device) for value in values})
        if len(devices) > 1:
            found.append(f"{node.target} mixes {' and '.join(devices)}")
    return found


def host_results(graph: fx.Graph) -> Counter[str]:
    """Return how many tensors of the step on a GPU lie on the host, by the op that makes them."""
    values = [(node, value) for node in graph.nodes if node.op == "call_function" for value in tensors(node)]
    return Counter(str(node.target) for node, value in values if value.device.type == "cpu" and not _is_item(node))


def writes(graph: fx.Graph) -> Counter[str]:
    """Return how many ops write to their inputs, by op."""
    return Counter(str(node.target) for node in _ops(graph) if written_inputs(node))


def repeated_writes(trace: Trace, graph: fx.Graph) -> list[str]:
    """Return the ops that write to their inputs and may run again, or do in the rewritten graph."""
    op = trace.op
    found = [node for node in _ops(graph) if written_inputs(node)]
    return [
        f"{node.target} writes to its inputs, and runs again"
        for node in found
        if "again" in node.meta or (node.name in op and not op[node.name].once)
    ]


def unknown_workspaces(graph: fx.Graph, price: Price) -> Counter[str]:
    """Return how many ops have a kernel that allocates, and no workspace in their price, by op."""
    found: Counter[str] = Counter()
    for node in _ops(graph):
        if is_view(node) or not any(part in str(node.target) for part in ALLOCATING):
            continue
        if not price(node).workspace:
            found[str(node.target)] += 1
    return found


def op_names(graph: fx.Graph) -> Counter[str]:
    """Return how often each op that computes is in a graph."""
    return Counter(str(node.target) for node in _ops(graph) if not is_view(node))


def _ops(graph: fx.Graph) -> Iterator[fx.Node]:
    return (node for node in graph.nodes if node.op == "call_function" and isinstance(node.target, OpOverload))


def _is_item(node: fx.Node) -> bool:
    return not isinstance(node.target, OpOverload)
