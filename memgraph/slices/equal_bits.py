"""Try on the device whether an op has the same bits when it reads or makes a weight in blocks of rows.

mm(dy, w)  f32[256, 10000] x f32[10000, 2048], blocks of 1536 rows    ->   True
                                               blocks of 1000 rows    ->   False: the sum is cut elsewhere
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from passes.slices.row_blocks import Rows, rows_of_blocks

from ..graph.nodes import named_placeholder, tensors
from ..profile.memory_meter import resident_bytes
from ..profile.op_cost import op_key
from ..system.device import unused_nbytes
from ..system.measurement_cache import read_cached, write_cached
from ..system.setting import environment_key
from .row_blocks import write_blocks
from .weights import Weight


def has_equal_bits(weight: Weight, size: int) -> bool:
    """Return True if all that reads a weight, or makes its gradient, has the same bits in blocks of `size` rows.

    Each op runs once on random numbers, whole and in blocks; what was found is cached on disk. False if there is no
    memory to try.
    """
    if any(found is not None and not found for found in _known(weight, size)):
        return False
    return all(_is_equal(op, weight, size) for op in weight.ops)


def trial_nbytes(weight: Weight, size: int) -> int:
    """Return the most that trying a weight in blocks takes; 0 if what is found is known."""
    known = _known(weight, size)
    if any(found is not None and not found for found in known):
        return 0
    untried = [op for op, found in zip(weight.ops, known, strict=True) if found is None]
    return max((_read_nbytes(op, weight) + 2 * resident_bytes(tensors(op)) for op in untried), default=0)


def _known(weight: Weight, size: int) -> list[object]:
    """Return what is known of each op; None for one that was not tried."""
    return [read_cached(_key(op, weight, size)) for op in weight.ops]


def _is_equal(op: fx.Node, weight: Weight, size: int) -> bool:
    device, key = weight.value.device, _key(op, weight, size)
    known = read_cached(key)
    if known is None:
        nbytes = _read_nbytes(op, weight) + resident_bytes(tensors(op))
        if nbytes > unused_nbytes(device) // 3:  # arguments, and two results
            return False
        known = _try(op, weight, rows_of_blocks(weight.rows, size))
        write_cached(key, known)
    return bool(known)


def _key(op: fx.Node, weight: Weight, size: int) -> str:
    return f"bits in blocks of {size} rows {op_key(op)} {environment_key(weight.value.device)}"


def _read_nbytes(op: fx.Node, weight: Weight) -> int:
    """Return the bytes of an op's arguments, and of the weight."""
    return resident_bytes(value for node in (weight.node, *op.all_input_nodes) for value in tensors(node))


def _try(op: fx.Node, weight: Weight, blocks: tuple[Rows, ...]) -> bool:
    graph, alone = _alone(op, weight)
    inputs = graph.find_nodes(op="placeholder")
    random = torch.Generator(weight.value.device).manual_seed(0)
    given = [_random(node.meta["val"], weight.rows, random) for node in inputs]
    in_blocks = [part for x, node in zip(given, inputs, strict=True) for part in _parts(x, node, alone, blocks)]
    with torch.no_grad(), torch._C._DisableAutocast():
        whole = fx.GraphModule(torch.nn.Module(), graph)(*given)
        divided = fx.GraphModule(torch.nn.Module(), write_blocks(graph, {alone: blocks}))(*in_blocks)
    parts = whole[0].split([len(part) for part in divided]) if len(divided) > 1 else whole
    return all(map(torch.equal, parts, divided))


def _alone(op: fx.Node, weight: Weight) -> tuple[fx.Graph, Weight]:
    """Return a graph of this op alone, and the weight in it."""
    graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in dict.fromkeys((weight.node, *(each for each in op.all_input_nodes if each not in weight.views))):
        env[node] = named_placeholder(graph, node.name)
        env[node].meta = {"val": node.meta["val"], "kind": "input"}
    for node in (*(view for view in weight.views if view in op.all_input_nodes), op):
        env[node] = graph.node_copy(node, env.__getitem__)
    graph.output((env[op],)).meta["kinds"] = ("output",)
    views, own = tuple(env[view] for view in weight.views if view in env), (env[op],)
    return graph, Weight(env[weight.node], views, *(((), own) if op in weight.terms else (own, ())))


def _random(fake: Tensor, rows: int, random: torch.Generator) -> Tensor:
    x = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)
    return x.normal_(generator=random) if x.is_floating_point() else x.random_(0, rows, generator=random)


def _parts(x: Tensor, node: fx.Node, weight: Weight, blocks: tuple[Rows, ...]) -> list[Tensor]:
    return [x[first:last] for first, last in blocks] if node is weight.node else [x]
