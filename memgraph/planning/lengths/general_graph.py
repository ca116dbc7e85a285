"""The graph of a step with symbols for lengths -> the text of one length, and the ops that are priced for it.

mm = mm(x, w)  # f32[8*s, 64] | makes mm:2048*s      ->   mm = mm(x, w)  # f32[800, 64] | makes mm:204800
12 layers, each with that mm                         ->   one op to run, with numbers

Nothing is done per node but to print its line: equal ops have one price, and equal types one text.

Code of a planned step in which sizes are names, for all lengths with the same decisions.

view(x, [8 * s, 64])   ->   view(x, [size__0, 64])   ->   for length 100 with size__0 = 800

It is written and compiled once. What differs between lengths is the dict of global names that it reads.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

from torch import SymInt, Tensor, fx
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from passes import Op, Storage, Trace
from passes.ir.ops import is_runtime, verb_of

from ...capture.sizes.at_lengths import SizedValues, copy_at, graph_at
from ...capture.sizes.later_graph import LaterGraph
from ...capture.sizes.size_inputs import name_sizes
from ...graph.captured import Captured
from ...graph.halves.partition import Partition, partition
from ...graph.nodes import is_lazy, tensors
from ...graph.result_layout import ResultLayout, layout_in_storage
from ...graph.rewrite import rewrite
from ...graph.summarize import Cost, Price, describe_type, summarize, zero_cost
from ...profile.op_profiler import is_view
from ...system.device import block_nbytes
from ...tensors.traced_size import Number, SizeArgument, SizeTrace, with_sizes

CODES = 4  # of the latest plans of one graph
RANDOM = ("rng_state", "swap_rng")  # memory ops that have no sizes
NAME = "memgraph_size_"


class GeneralGraph:
    """The graph of a step with symbols. Its text, its distinct ops and the code of its latest plans are kept.

    Attributes:
        describes_values: False if real values turned out to have other layouts.
    """

    def __init__(self, graph: fx.Graph, captured: Captured, trace: SizeTrace) -> None:
        self.graph, self.captured, self.trace = graph, captured, trace
        self.text = summarize(graph)
        self.types: dict[str, list[tuple[Any, Sequence[int | SymInt]]]] = {}
        self.distinct: dict[str, fx.Node] = {}
        nodes = (node for node in graph.nodes if node.op != "output")
        self.kinds = [self._kind_of(op, node) for op, node in zip(self.text.ops, nodes, strict=True)]
        self._codes: OrderedDict[Hashable, GeneralCode] = OrderedDict()
        # No layout says that a value is lazily conjugated or negated.
        self.describes_values = not any(map(is_lazy, graph.nodes))

    def code(self, applied: Trace) -> GeneralCode | None:
        """Return the code that runs this text with any sizes; None if it offloads, or other lengths run another."""
        if any(op.offloaded or op.on_host or self._has_sizes(op) for op in applied.ops):
            return None
        ops = tuple((op.name, op.fn, op.reads, op.phase, op.recomputes, op.section) for op in applied.ops)
        key = ops, applied.outputs
        if key not in self._codes:
            self._codes[key] = GeneralCode(self.graph, applied, self.captured)
            while len(self._codes) > CODES:
                self._codes.popitem(last=False)
        self._codes.move_to_end(key)
        return self._codes[key]

    def _has_sizes(self, op: Op) -> bool:
        """Return True for memory ops that know the size of what they copy."""
        return is_runtime(op.fn) and op.name not in self.text.op and verb_of(op.fn) not in RANDOM

    def _kind_of(self, op: Op, node: fx.Node) -> str:
        """Return the kind as which an op is priced; "" if it is not."""
        self.types[op.type] = [(value.dtype, tuple(value.shape)) for value in tensors(node)]
        kind = ""
        if node.op == "call_function" and not is_view(node):
            kind = _kind(node)
            self.distinct.setdefault(kind, node)
        return kind


class GraphAtLength:
    """A general graph with numbers for its sizes.

    Attributes:
        inputs: the inputs of the step.
        ops: one op of each kind, with its operands as inputs.
    """

    def __init__(self, general: GeneralGraph, lengths: Sequence[int]) -> None:
        self.general, self.lengths = general, lengths
        self.number = general.trace.at(lengths)
        self.values = SizedValues(self.number)
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        self.inputs = [self._operand(node, graph, copies) for node in general.graph.find_nodes(op="placeholder")]
        self.ops = {kind: self._op(node, graph, copies) for kind, node in general.distinct.items()}

    def summarize(self, price: Price = zero_cost) -> Trace:
        """Return the text of this length."""
        costs = {kind: self._cost(price(node), node) for kind, node in self.ops.items()} | {"": Cost()}
        types = {text: self._type(parts) for text, parts in self.general.types.items()}
        number = self.number

        def op_of(op: Op, kind: str) -> Op:
            makes, cost = tuple(Storage(made.name, number(made.nbytes)) for made in op.makes), costs[kind]
            return op.priced(makes, types[op.type], cost.us, cost.workspace)

        return Trace(tuple(map(op_of, self.general.text.ops, self.general.kinds)), self.general.text.outputs)

    def has_layouts(self, layouts: Callable[[fx.Node], tuple[ResultLayout, ...] | None]) -> bool:
        """Return True if real results have the layouts of the fake ones."""
        for node in self.ops.values():
            real, expected = layouts(node), tuple(map(layout_in_storage, tensors(node)))
            if real is not None and len(real) == len(expected) and real != expected:
                self.general.describes_values = False
        return self.general.describes_values

    def halves(self, applied: Trace) -> Partition | None:
        """Return both halves of the step with this text; None if they have to be made for this length alone."""
        code = self.general.code(applied)
        if code is None or not self.general.trace.holds(self.lengths):  # to rewrite a graph may compare sizes
            return None
        return code.at(self.values)

    def _cost(self, cost: Cost, node: fx.Node) -> Cost:
        made = tensors(node)
        return Cost(cost.us, block_nbytes(cost.workspace, made[0].device) if made else cost.workspace)

    def _operand(self, node: fx.Node, graph: fx.Graph, copies: dict[fx.Node, fx.Node]) -> fx.Node:
        if node not in copies:
            copies[node] = graph.placeholder(node.name)
            copies[node].meta = dict(node.meta)
            if "val" in node.meta:
                copies[node].meta["val"] = self.values.at(node.meta["val"])
        return copies[node]

    def _op(self, node: fx.Node, graph: fx.Graph, copies: dict[fx.Node, fx.Node]) -> fx.Node:
        for read in node.all_input_nodes:
            self._operand(read, graph, copies)
        return copy_at(node, graph, copies, self.values)

    def _type(self, parts: Sequence[tuple[Any, Sequence[int | SymInt]]]) -> str:
        return ", ".join(describe_type(dtype, [*map(self.number, shape)]) for dtype, shape in parts)


def _kind(node: fx.Node) -> str:
    """Return a text that is equal for ops that are equal at every length."""
    args, kwargs = with_sizes((node.args, dict(node.kwargs)))
    args, kwargs = map_aggregate((args, kwargs), _describe)
    return f"{node.target}{args!r}{kwargs!r} -> {[*map(_describe_tensor, tensors(node))]!r}"


def _describe(leaf: Any) -> Any:
    if not isinstance(leaf, fx.Node):
        return leaf
    return [*map(_describe_tensor, tensors(leaf))] if "val" in leaf.meta else "a generator"


def _describe_tensor(value: Tensor) -> object:
    nbytes = value.untyped_storage().nbytes()
    return value.dtype, tuple(value.shape), value.stride(), value.storage_offset(), nbytes, str(value.device)


class NamedSize(SizeArgument):
    """A size that is written as a name."""

    name: str

    def __repr__(self) -> str:
        return self.name


class GeneralCode:
    """Both halves of a step with symbols that runs the text `applied`."""

    def __init__(self, graph: fx.Graph, applied: Trace, captured: Captured) -> None:
        self._sizes: dict[Any, NamedSize] = {}
        planned = rewrite(graph, applied)
        name_sizes(planned)
        for node in planned.nodes:
            node.args, node.kwargs = pytree.tree_map_only(SizeArgument, self._named, (node.args, dict(node.kwargs)))
        self.halves = partition(planned, captured.graph, captured.floats)

    def at(self, values: SizedValues) -> Partition:
        """Return the halves with numbers."""
        sizes = {size.name: values.number(size) for size in self._sizes.values()}
        backward = self.halves.backward
        return Partition(
            _half(self.halves.forward, values.number, sizes),
            None if backward is None else _half(backward, values.number, sizes),
            tuple(map(values.at, self.halves.tangents)),
            self.halves.tangent_names,
            self.halves.caller_values,
        )

    def _named(self, argument: SizeArgument) -> NamedSize:
        key = argument.size.node.expr
        if key not in self._sizes:
            self._sizes[key] = NamedSize(argument.size)
            self._sizes[key].name = f"{NAME}{len(self._sizes) - 1}"
        return self._sizes[key]


def _half(half: fx.GraphModule, number: Number, sizes: dict[str, int]) -> LaterGraph:
    return LaterGraph(half, partial(graph_at, half.graph, number), sizes)
