"""Run each op of a graph in parts, by each of its rules, and compare with the op on the whole.

    wrong(graph, inputs)    ->    ["mm 0:1<0:1,-: values differ", ...], or nothing

A rule is tried by the slice that has this op alone, so the graph that runs is the one that a step in slices runs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from memgraph.graph.nodes import fake_result
from memgraph.graph.rewrite import fake_mode
from memgraph.graph.summarize import summarize
from memgraph.slices.row_facts import row_facts
from memgraph.slices.sliced_graph import sliced_graph
from passes import check
from passes.slices.row_rule import Dims, RowRule, rows_of, type_shape
from passes.slices.slice import Slice
from passes.slices.unroll import unroll

# Whose parts are summed in another order, or by another kernel: for rows with gaps, or the last elements of a tensor.
INEXACT = (
    "gelu", "gelu_backward", "silu", "atanh", "logit", "mm", "addmm", "bmm", "sum", "mean", "var", "std", "logsumexp", "_softmax",
    "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data",
)  # fmt: skip


def traced(function: Callable[..., Any], *inputs: Tensor) -> fx.Graph:
    """Return the graph of a function of tensors, as `summarize` wants it; each op's value is an output."""
    graph: fx.Graph = make_fx(function, tracing_mode="fake")(*inputs).graph
    for node in graph.nodes:
        node.meta |= {"kind": "input"} if node.op == "placeholder" else {"phase": "forward"}
    return with_outputs(graph)


def with_outputs(graph: fx.Graph) -> fx.Graph:
    """Let a graph return all that its ops make."""
    made = [node for node in graph.nodes if node.op == "call_function" and isinstance(node.meta.get("val"), Tensor)]
    output = graph.output_node()
    output.args = (tuple(made),)
    output.meta["kinds"] = ("output",) * len(made)
    return graph


def wrong(graph: fx.Graph, inputs: Sequence[Any], root: Any = None) -> list[str]:
    """Return the rules that are wrong, and the sets of reads that an op is said to be linear in, but is not."""
    values = Values(graph, root)
    values.run(*inputs)
    found = []
    for node in graph.nodes:
        if node.op == "call_function":
            facts = row_facts(node)
            for rule in facts.rules:
                found += [f"{node.target} {rule}: {why}" for why in _wrong_rule(values, node, rule)]
            for reads in _subsets(len(node.all_input_nodes)):
                if facts.is_linear(reads) and not _is_linear(values, node, reads):
                    found.append(f"{node.target} {node.args}: not linear in {reads}")
    return found


class Values(fx.Interpreter):
    """Runs a graph, and keeps its values: by node, and by name."""

    def __init__(self, graph: fx.Graph, root: Any = None) -> None:
        super().__init__(
            fx.GraphModule(torch.nn.Module() if root is None else root, graph), garbage_collect_values=False
        )

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        self.seen = {**getattr(self, "seen", {}), n.name: value}
        return value


def _wrong_rule(values: Values, node: fx.Node, rule: RowRule) -> Iterator[str]:
    graph: fx.Graph = node.graph
    alone = _alone(graph, node)
    trace = summarize(alone)
    divided = [(type_shape(trace.op[name].type), dims) for name, dims in _dims(node, rule)]
    cut = _slice(node.name, rule, divided)
    if cut is None:
        return
    inputs = [values.seen[read.name] for read in node.all_input_nodes]
    (expected,) = fx.Interpreter(fx.GraphModule(torch.nn.Module(), alone)).run(*inputs)
    for parts in sorted({2 if cut.rows % 2 else 3, cut.rows if cut.rows < 8 else 8}):  # uneven ones, and of one row
        unrolled = unroll(trace, replace(cut, parts=parts))
        check(unrolled.trace)
        try:
            sliced = sliced_graph(alone, unrolled)
            sliced.output_node().meta["kinds"] = ("output",)
            (result,) = fx.Interpreter(fx.GraphModule(torch.nn.Module(), sliced)).run(*inputs)
        except Exception as error:  # whatever torch says of it
            yield f"{parts} parts can't run: {str(error).splitlines()[0]}"
            return
        if text := _differs(str(node.target), result, expected):
            yield f"{parts} parts: {text}"
        pairs = zip(summarize(sliced).ops, unrolled.trace.ops, strict=True)
        if unlike := next((f"{one} is not {other}" for one, other in pairs if one != other), ""):
            yield f"{parts} parts: {unlike}"


def _alone(graph: fx.Graph, node: fx.Node) -> fx.Graph:
    """Return a graph of one op, whose inputs are what the op reads."""
    alone = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for read in node.all_input_nodes:
        env[read] = alone.placeholder(read.name)
        env[read].meta = {"val": _apart(read.meta["val"]), "kind": "input"}
        env[read].name = read.name
    copied = alone.node_copy(node, env.__getitem__)
    copied.name = node.name
    copied.meta = {"val": fake_result(copied, fake_mode(alone)), "phase": "forward"}
    output = alone.output((copied,))
    output.meta = {"kinds": ("output",)}
    return alone


def _apart(value: Any) -> Any:
    """Return a fake tensor of the same layout that shares no storage."""
    if not isinstance(value, FakeTensor):
        return value
    with value.fake_mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _dims(node: fx.Node, rule: RowRule) -> list[tuple[str, Dims]]:
    pairs = [
        (node.name, rule.makes),
        *((read.name, dims) for read, dims in zip(node.all_input_nodes, rule.reads, strict=True)),
    ]
    return [(name, dims) for name, dims in pairs if dims is not None]


def _slice(name: str, rule: RowRule, divided: Sequence[tuple[tuple[int, ...], Dims]]) -> Slice | None:
    """Return the slice of one op by one rule, of as many rows as fit; None for one row, or sequences of two lengths."""
    tokens = {shape[dims[1] - 1] for shape, dims in divided if dims[1] - dims[0] > 1}
    counts = {rows_of(shape, dims) for shape, dims in divided}
    rows = math.gcd(*counts)
    if len(tokens) > 1 or (tokens and len(counts) > 1) or rows < 2:
        return None
    return Slice(rows, max(tokens, default=0), 2, ((name, rule),))


def _differs(target: str, result: Tensor, expected: Tensor) -> str:
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return f"{result.dtype}{list(result.shape)} is not {expected.dtype}{list(expected.shape)}"
    if target.split(".")[1] in INEXACT and (expected.is_floating_point() or expected.is_complex()):
        try:
            torch.testing.assert_close(result, expected, equal_nan=True)
        except AssertionError as error:
            return str(error).splitlines()[0]
        return ""
    equal = torch.equal(result.isnan(), expected.isnan()) and torch.equal(*(x.nan_to_num() for x in (result, expected)))
    return "" if equal else f"values differ: {result.flatten()[:8]}, {expected.flatten()[:8]}"


def _subsets(count: int) -> Iterator[set[int]]:
    for size in range(1, count + 1):
        yield from map(set, itertools.combinations(range(count), size))


def _wide(value: Any) -> Any:
    """Return float64 for another dtype of floats, and any other argument as it is."""
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value


def _is_linear(values: Values, node: fx.Node, reads: set[int]) -> bool:
    """Return True if f(2x - 3y) = 2f(x) - 3f(y), for random x and y of what the op reads there, in float64."""
    nodes = node.all_input_nodes
    given = {read: values.seen[read.name] for read in nodes}
    chosen = [nodes[i] for i in sorted(reads)]
    if not all(given[read].is_floating_point() for read in chosen):
        return True  # nothing that depends on a tangent
    fixed = {read: x.double() if x.is_floating_point() else x for read, x in given.items()}

    def run(other: dict[fx.Node, Tensor]) -> Tensor:
        env = fixed | other
        args, kwargs = map_arg((node.args, node.kwargs), env.__getitem__)
        kwargs = {key: _wide(value) for key, value in kwargs.items()}
        return node.target(*args, **kwargs).double()  # type: ignore[operator]

    generator = torch.Generator().manual_seed(3)
    x, y = (
        {read: torch.randn(fixed[read].shape, generator=generator, dtype=torch.float64) for read in chosen}
        for _ in "xy"
    )
    both = run({read: 2 * x[read] - 3 * y[read] for read in chosen})
    return torch.allclose(both, 2 * run(x) - 3 * run(y), rtol=1e-9, atol=1e-9, equal_nan=True)
