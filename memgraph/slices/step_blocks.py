"""Cut a captured step so that its large weights are read in blocks of rows.

level 0         ->   all weights are whole
level 1, 2      ->   larger weights in blocks, and more of them
a saved plan    ->   the blocks that it has

Try on the device whether an op has the same bits when it reads or makes a weight in blocks of rows.

mm(dy, w)  f32[256, 10000] x f32[10000, 2048], blocks of 1536 rows    ->   True
                                               blocks of 1000 rows    ->   False: the sum is cut elsewhere

Write a graph so that weights are read in blocks of rows, each an input of its own.

w = parameter()                             w__rows_1 = parameter()            # the first 384 rows
y = addmm(b, x, t(w))                       y__room = empty(...)
--- backward ---                            y__room[:, :384] = addmm(b[:384], x, t(w__rows_1))      ...
dx = mm(dy, w)                      ->      --- backward ---
dw = mm(t(dy), x)                           dx__sum = mm(dy[:, :384], w__rows_1);  dx__sum += dy[:, 384:768] w__rows_2
return gradient dw                          dw__rows_1 = mm(t(dy)[:384], x)                         ...
                                            return gradient dw__rows_1, gradient dw__rows_2, ...
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from passes.ir.machine import SMALLEST_STREAMED
from passes.slices.row_blocks import Rows, block_nbytes, block_sizes, rows_of_blocks
from passes.slices.whole_weight import Reason, WholeWeight

from ..graph.captured import Captured
from ..graph.nodes import aten, fake_result, named_placeholder, tensors
from ..graph.rewrite import fake_mode
from ..profile.memory_meter import resident_bytes
from ..profile.op_cost import op_key
from ..report.tables import mb
from ..storage.spill_file import PAGE
from ..system.device import unused_nbytes
from ..system.measurement_cache import read_cached, write_cached
from ..system.setting import environment_key
from .slice_ops import INDICES_WITHIN, LOOK_UP
from .weights import LOOKUP, LOOKUP_GRADIENT, Weight, weights_by_name, whole_weights

LOG = logging.getLogger(__name__)
Blocks = Mapping[Weight, tuple[Rows, ...]]


class BlockTrials:
    """Tries whether weights have the same bits in blocks; the first trial that exceeds the budget is logged.

    Args:
        room: bytes that the budget leaves for a trial; None for no budget.
    """

    def __init__(self, room: int | None = None) -> None:
        self.room, self._is_logged = room, False

    def __call__(self, weight: Weight, size: int) -> bool:
        if self.room is not None and not self._is_logged and (nbytes := trial_nbytes(weight, size)) > max(self.room, 0):
            self._is_logged = True
            LOG.warning(
                "planning goes beyond the budget: a weight of %s, which is tried in blocks of rows, takes %s, and the "
                "budget leaves %s for it; to stay within it, call memgraph.plan with the same model, budget and "
                "MEMGRAPH_CACHE in a process that may use more memory, and what it finds is read from that cache",
                list(weight.value.shape), mb(nbytes), mb(max(self.room, 0)),
            )  # fmt: skip
        return has_equal_bits(weight, size)


@dataclass(frozen=True)
class BlockRequest:
    """The blocks that are asked for.

    Attributes:
        level: how many weights are cut, and how finely, as in `passes/slices/row_blocks.py`.
        rounds: weights are cut as well where sums round differently in blocks.
        tries: False for a device that is not here: its kernels can't be tried, and the largest blocks are taken.
        saved: rows of a block by parameter, in each saved plan.
        has_equal_bits: tries a weight in blocks.
    """

    level: int = 0
    rounds: bool = False
    tries: bool = True
    saved: tuple[Mapping[str, int], ...] = ()
    held: frozenset[str] = frozenset()
    has_equal_bits: BlockTrials = field(default_factory=BlockTrials)

    @property
    def is_made(self) -> bool:
        """Return True if any are asked for."""
        return self.level > 0 or any(self.saved)


def in_blocks(captured: Captured, request: BlockRequest) -> Captured:
    """Return the step with weights in blocks, and with the reasons of those that stay whole."""
    if not request.is_made:
        return captured
    weights = weights_by_name(captured, request.held)
    if request.saved:
        sizes, whole = _saved(weights, request.saved), tuple[WholeWeight, ...]()
    else:
        sizes, whole = _chosen(weights, whole_weights(captured, held=request.held), request)
    if sizes:
        blocks = {name: rows_of_blocks(weights[name].rows, size) for name, size in sizes.items()}
        trial = request.has_equal_bits
        rounded = {name for name, size in sizes.items() if request.tries and not trial(weights[name], size)}
        captured = replace(in_row_blocks(captured, blocks, weights), rounded_blocks=frozenset(rounded))
    return replace(captured, whole_weights=whole, whole=captured.unsliced)


def refused_weights(captured: Captured, refused: Reason) -> tuple[WholeWeight, ...]:
    """Return the weights for which blocks would be looked for, if they were not `refused` for the whole step."""
    whole = whole_weights(captured, refused)
    return tuple(whole[name] for name in _looked_for({}, whole, 1))


def _saved(weights: Mapping[str, Weight], plans: Sequence[Mapping[str, int]]) -> Mapping[str, int]:
    """Return the blocks of the first plan whose weights this step has; a call of another step is left whole."""
    known = (sizes for sizes in plans if sizes and all(_can_cut(weights.get(name), sizes[name]) for name in sizes))
    return next(known, {})


def _can_cut(weight: Weight | None, size: int) -> bool:
    return weight is not None and 0 < size < weight.rows and size * weight.row_nbytes % PAGE == 0


def _chosen(
    weights: Mapping[str, Weight], whole: Mapping[str, WholeWeight], request: BlockRequest
) -> tuple[dict[str, int], tuple[WholeWeight, ...]]:
    """Return the rows of a block for each weight that is cut, and the large weights that stay whole.

    A block has the most rows whose bits are those of the whole.
    """
    large = {name: each.value.nbytes for name, each in weights.items() if each.value.nbytes > SMALLEST_STREAMED}
    largest = max(whole.values(), key=lambda each: each.nbytes, default=None)
    most = block_nbytes(large, request.level, 0 if largest is None else largest.nbytes)
    chosen, left = dict[str, int](), list[WholeWeight]()
    for name in _looked_for(large, whole, request.level):
        if name in whole:
            left.append(whole[name])
        elif name not in most and largest is not None:
            left.append(WholeWeight(name, large[name], Reason.SMALLER, largest.weight))
        else:
            sizes = block_sizes(weights[name].rows, weights[name].row_nbytes, most[name], PAGE)
            if size := _size(weights[name], sizes, request):
                chosen[name] = size
            else:
                left.append(WholeWeight(name, large[name], Reason.BITS if sizes else Reason.ROWS))
    return chosen, tuple(left)


def _looked_for(large: Mapping[str, int], whole: Mapping[str, WholeWeight], level: int) -> list[str]:
    """Return the names of all weights, with those that stay whole, that are large enough for blocks."""
    sizes = {**large, **{name: each.nbytes for name, each in whole.items() if each.nbytes > SMALLEST_STREAMED}}
    return list(block_nbytes(sizes, level))


def _size(weight: Weight, sizes: Sequence[int], request: BlockRequest) -> int:
    """Return the rows of a block; 0 if none has the bits of the whole, and no sum may round."""
    equal = (size for size in sizes if not request.tries or request.has_equal_bits(weight, size))
    return next(equal, sizes[0] if sizes and request.rounds else 0)


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


def in_row_blocks(
    captured: Captured, blocks: Mapping[str, tuple[Rows, ...]], weights: Mapping[str, Weight]
) -> Captured:
    """Return a step whose graph reads these parameters in blocks; its inputs and outputs stay those of the call."""
    graph = write_blocks(captured.graph.graph, {weights[name]: rows for name, rows in blocks.items()})
    module = fx.GraphModule(captured.graph, graph)
    return replace(captured, graph=module, blocks=dict(blocks), whole=captured.unsliced)


def write_blocks(graph: fx.Graph, blocks: Blocks) -> fx.Graph:
    """Return a graph that reads weights of `graph` in blocks, and makes their gradients in blocks."""
    writer = _Writer(graph, blocks)
    for node in graph.nodes:
        writer.add(node)
    writer.new.lint()
    return writer.new


class _Writer:
    """Builds the new graph.

    Attributes:
        env: maps nodes of the old graph to those of the new one.
        parts: maps weights and their gradients to their blocks.
        waiting: sums that make gradients, and their terms: these are made where the last sum is, for no micro-batch.
    """

    def __init__(self, graph: fx.Graph, blocks: Blocks) -> None:
        self.mode, self.new, self.count = fake_mode(graph), fx.Graph(), 0
        self.env: dict[fx.Node, fx.Node] = {}
        self.parts: dict[fx.Node, list[fx.Node]] = {}
        self.weights = {weight.node: rows for weight, rows in blocks.items()}
        self.views = {view: weight.node for weight in blocks for view in weight.views}
        self.reads = {read: weight.node for weight in blocks for read in weight.reads}
        self.gradients = {weight.gradient: rows for weight, rows in blocks.items() if weight.gradient is not None}
        self.sums = {node for weight in blocks for node in weight.sums}
        self.waiting = self.sums | {node for weight in blocks for node in weight.terms if weight.sums}

    def add(self, node: fx.Node) -> None:
        """Add what stands for a node of the old graph."""
        if node in self.weights:
            self.parts[node] = [self._input(node, k, rows) for k, rows in enumerate(self.weights[node], 1)]
        elif node in self.reads:
            self.env[node] = self._read(node, self.reads[node])
        elif node in self.gradients:
            self.parts[node] = [self._gradient(node, k, rows) for k, rows in enumerate(self.gradients[node], 1)]
        elif node.op == "output":
            self._output(node)
        elif node not in self.views and node not in self.waiting:
            self.env[node] = self.new.node_copy(node, self.env.__getitem__)
            self.env[node].name, self.env[node].meta = node.name, dict(node.meta)

    def _input(self, weight: fx.Node, k: int, rows: Rows) -> fx.Node:
        whole: Tensor = weight.meta["val"]
        node = named_placeholder(self.new, f"{weight.name}__rows_{k}")
        with self.mode:
            value = torch.empty(rows[1] - rows[0], whole.shape[1], dtype=whole.dtype, device=whole.device)
        node.meta = {**weight.meta, "val": value}
        return node

    def _read(self, node: fx.Node, weight: fx.Node) -> fx.Node:
        blocks = list(zip(self.parts[weight], self.weights[weight], strict=True))
        if node.target is LOOKUP:
            total = self._room(node)
            for part, rows in blocks:
                self._call(node, LOOK_UP, total, part, self.env[node.args[1]], rows[0], weight.meta["val"].shape[0])  # type: ignore[index]
        elif node.args[-1] is weight:
            total = self._sum(node, blocks)
        else:
            total = self._room(node)
            for part, rows in blocks:
                self._write_columns(node, total, part, rows)
        return self._shared(self._call(node, aten.alias.default, total), node, node.name)

    def _write_columns(self, node: fx.Node, room: fx.Node, part: fx.Node, rows: Rows) -> None:
        *bias, x = (self.env[argument] for argument in node.args[:-1])  # type: ignore[index]
        bias = [self._slice(node, each, -1, rows) for each in bias]
        columns = self._call(node, node.target, *bias, x, self._call(node, aten.t.default, part))
        self._call(node, aten.copy_.default, self._slice(node, room, 1, rows), columns)

    def _sum(self, node: fx.Node, blocks: list[tuple[fx.Node, Rows]]) -> fx.Node:
        *bias, x = (self.env[argument] for argument in node.args[:-1])  # type: ignore[index]
        (first, rows), *rest = blocks
        total = self._call(node, node.target, *bias, self._slice(node, x, 1, rows), first)
        self._shared(total, node, f"{node.name}__sum")
        for part, rows in rest:
            self._call(node, aten.addmm_.default, total, self._slice(node, x, 1, rows), part)
        return total

    def _gradient(self, node: fx.Node, k: int, rows: Rows) -> fx.Node:
        """Add the ops that make a block of a gradient, each sum behind its terms, before the next block."""
        if node in self.sums:
            part = self._call(node, node.target, *(self._gradient(term, k, rows) for term in node.args))  # type: ignore[arg-type]
        else:
            part = self._term(node, rows)
        part.name = f"{node.name}__rows_{k}"
        return part

    def _term(self, node: fx.Node, rows: Rows) -> fx.Node:
        if node.target is LOOKUP_GRADIENT:
            dy, indices, _, padding, _ = node.args
            count = rows[1] - rows[0]
            here = self._call(node, INDICES_WITHIN, self.env[indices], rows[0], count, padding)  # type: ignore[index]
            return self._call(node, node.target, self.env[dy], here, count, -1, False)  # type: ignore[index]
        left, right = (self.env[argument] for argument in node.args)  # type: ignore[index]
        return self._call(node, node.target, self._slice(node, left, 0, rows), right)

    def _output(self, node: fx.Node) -> None:
        returned: list[fx.Node] = node.args[0]  # type: ignore[assignment]
        values = [self.parts.get(value) or [self.env[value]] for value in returned]
        output = self.new.output(tuple(value for each in values for value in each))
        kinds = node.meta["kinds"]
        repeated = [kind for kind, each in zip(kinds, values, strict=True) for _ in each]
        output.meta = {**node.meta, "kinds": tuple(repeated)}

    def _room(self, node: fx.Node) -> fx.Node:
        value: Tensor = node.meta["val"]
        layout = list(value.shape), list(value.stride())
        room = self._call(node, aten.empty_strided.default, *layout, dtype=value.dtype, device=value.device)
        return self._shared(room, node, f"{node.name}__room")

    def _slice(self, node: fx.Node, value: fx.Node, dim: int, rows: Rows) -> fx.Node:
        return self._call(node, aten.slice.Tensor, value, dim, *rows)

    def _shared(self, new: fx.Node, node: fx.Node, name: str) -> fx.Node:
        """Let a new node have the fake value of the captured one, which later views share."""
        new.meta["val"], new.name = node.meta["val"], name
        return new

    def _call(self, node: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        self.count += 1  # names of torch's own might be those of ops to come
        new = self.new.create_node("call_function", target, args, kwargs, f"{node.name}__part_{self.count}")
        kept = ("phase", "where", "part") if node not in self.waiting else ("phase", "where")
        new.meta = {name: fact for name, fact in node.meta.items() if name in kept}
        new.meta["val"] = fake_result(new, self.mode)
        return new
