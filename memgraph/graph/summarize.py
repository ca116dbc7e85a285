"""Summarize a joint fx graph as the trace that `passes` plans on.

    %mm : call_function[aten.mm.default](%x, %w)  ->  mm = aten.mm.default(x, w)  # f32[8, 16] | makes mm:512 | 3 us

One line per node. Storages are read off the fake tensors, so a view holds what another op made.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from passes import Op, Storage, Trace
from passes.ir.machine import CAST_WORKSPACE
from passes.ir.ops import SEGMENT

from ..system.device import block_nbytes
from .draws.generator_states import device_of_state
from .draws.host_draws import DRAW
from .inductor import Segment
from .nodes import all_storages, is_random, returned_values, storages, tensors, written_inputs
from .opaque_ops import is_opaque
from .ops import accumulate, state_nbytes, update

SHORT = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "b8",
    torch.complex64: "c64",
    torch.complex128: "c128",
}
# Batch norm in training reads the running statistics only to update them: running it again gives the same output.
PURE_WHEN_RERUN = (torch.ops.aten._native_batch_norm_legit_functional.default,)


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds of an op, and bytes that it allocates and frees while it runs."""

    us: float = 0.0
    workspace: int = 0


OFFLOADED = "offloaded"  # in the meta of an input whose bytes are in a tier
TIER = "tier"  # in the meta of such an input, or of an offload: the name of the tier, if it is not the nearest
DIVISOR = 64  # bytes of the tensor by which a sum over ranks is divided
OPS = torch.ops.memgraph
# Of memory ops, which are not profiled.
WORKSPACES: dict[Any, int] = {OPS.narrow.default: CAST_WORKSPACE, OPS.reduced.default: DIVISOR}
Price = Callable[[fx.Node], Cost]


def zero_cost(node: fx.Node) -> Cost:
    return Cost()


def summarize(graph: fx.Graph, price: Price = zero_cost) -> Trace:
    """Return the trace of a joint graph; placeholders have `meta["kind"]`, the output has `meta["kinds"]`."""
    written = _written(graph)
    names: dict[int, str] = {}
    ops: list[Op] = []
    for node in graph.nodes:
        if node.op == "output":
            values = zip(node.meta["kinds"], returned_values(graph), strict=True)
            return Trace(tuple(ops), tuple((kind, value.name) for kind, value in values))
        ops.append(_summarize_node(node, names, price, written))
    raise ValueError("the graph has no output node")


def draws(node: fx.Node) -> bool:
    """Return True if the op draws random numbers. Attention with dropout_p=0 does not, though torch 2.13 tags it so."""
    if not is_random(node) or has_own_generator(node):
        return False
    for argument, value in zip(node.target._schema.arguments, node.args, strict=False):  # type: ignore[union-attr]
        if argument.name == "dropout_p":
            return bool(value != 0.0)
    return "scaled_dot_product" not in str(node.target) or bool(node.kwargs.get("dropout_p", 0.0) != 0.0)


def has_own_generator(node: fx.Node) -> bool:
    """Return True if the op draws from a generator of the module or of Python, which it changes like a buffer; or if it
    reads or sets the state of torch's own."""
    if node.target is DRAW or device_of_state(node):
        return True
    return is_random(node) and any(read.op == "get_attr" and "val" not in read.meta for read in node.all_input_nodes)


def _summarize_node(node: fx.Node, names: dict[int, str], price: Price, written: set[fx.Node]) -> Op:
    values = tensors(node)
    makes, holds = [], []
    for i, value in enumerate(values):
        storage = value.untyped_storage()
        if storage._cdata not in names:
            names[storage._cdata] = node.name if not isinstance(node.meta["val"], tuple | list) else f"{node.name}.{i}"
            # On the first result's device: attention's seeds are on the host, unless a CUDA graph is recorded.
            nbytes = 0 if OFFLOADED in node.meta else block_nbytes(storage.nbytes(), values[0].device)
            makes.append(Storage(names[storage._cdata], nbytes))
        holds.append(names[storage._cdata])
    cost = price(node) if node.op == "call_function" else Cost()
    if node.target in WORKSPACES:
        cost = Cost(workspace=WORKSPACES[node.target])
    drawn = state_nbytes(values[0].device) if node.op == "call_function" and draws(node) else 0
    return Op(
        name=node.name,
        fn=fn_of(node),
        reads=tuple(read.name for read in node.all_input_nodes),
        makes=tuple(makes),
        holds=tuple(dict.fromkeys(holds)),
        phase=node.meta.get("phase", "forward"),
        us=cost.us,
        workspace=block_nbytes(cost.workspace, values[0].device) if values else cost.workspace,
        draws=drawn,
        once=_once(node, written),
        offloaded=OFFLOADED in node.meta,
        tier=node.meta.get(TIER, ""),
        recomputes=node.meta.get("again", ""),
        microbatch=node.meta.get("part", 0),
        section=node.meta.get("section", 0),
        type=", ".join(describe_type(value.dtype, value.shape) for value in values),
        where=node.meta.get("where", ""),
    )


def fn_of(node: fx.Node) -> str:
    """Return the name of an op, or the kind of an input, as a trace has it."""
    if node.op == "placeholder":
        return str(node.meta["kind"])
    if node.op == "get_attr":
        return "buffer"
    if node.target is operator.getitem:
        return "getitem"
    if isinstance(node.target, Segment):
        return SEGMENT
    runtime_op = next((op for op in (accumulate, update) if node.target is op), None)
    return str(node.target) if runtime_op is None else f"memgraph.{runtime_op.__name__}"


def describe_type(dtype: torch.dtype, shape: Sequence[int]) -> str:
    """Return the text of a tensor's type."""
    return f"{SHORT.get(dtype, str(dtype).removeprefix('torch.'))}[{', '.join(map(str, shape))}]"


def _once(node: fx.Node, written: set[fx.Node]) -> bool:
    """Return True if the op may not run again: it runs Python, it changes what it reads, or the step does."""
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    if has_own_generator(node) or is_opaque(node):
        return True
    schema = getattr(node.target, "_schema", None)
    changes = node.target in (accumulate, update, OPS.gather.default) or bool(written_inputs(node))
    changes = changes or (schema is not None and schema.is_mutable)
    return changes or (node.target not in PURE_WHEN_RERUN and node in written)


def _written(graph: fx.Graph) -> set[fx.Node]:
    """Return the ops that read an input which the step writes to, or make or read what later ops write to."""
    last = {
        storage: i for i, node in enumerate(graph.nodes) for read in written_inputs(node) for storage in storages(read)
    }
    inputs = all_storages([*graph.find_nodes(op="placeholder"), *graph.find_nodes(op="get_attr")])
    last |= dict.fromkeys(inputs & last.keys(), len(graph.nodes))
    found = set()
    for i, node in enumerate(graph.nodes) if last else ():
        made = storages(node) - all_storages(node.all_input_nodes)
        if any(last.get(storage, -1) >= i for storage in made | all_storages(node.all_input_nodes)):
            found.add(node)
    return found
