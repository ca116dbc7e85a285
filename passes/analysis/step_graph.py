"""The step as a directed graph of priced ops, with an edge from each op to each op that reads its value.

    x = input()
    a = relu(x)  # 10 us         ->      x -> a -> b -> return,  w -> b
    b = mm(a, w)  # 90 us
    return output b

The graph answers questions about dependencies: which ops read a value, what a value is computed from, and which chain
of ops takes longest.  It is built once for a step: of 6,000 ops in 20 ms.  Planners that ask thousands of times index
arrays instead; `docs/design/planner.md` has both times.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from ..ir.trace import Trace

if TYPE_CHECKING:
    import networkx as nx  # imported where a graph is asked for: few steps need one, and the import takes 0.1 s

RETURN = "return"  # the node that reads the outputs of the step; no op has this name


def step_graph(trace: Trace) -> nx.DiGraph:
    """Return the ops as nodes with their prices, and the bytes of each value that is read on the edges."""
    import networkx as nx

    graph = nx.DiGraph(boundary=trace.boundary)
    for op in trace.ops:
        graph.add_node(
            op.name, fn=op.fn, phase=op.phase, us=op.us, nbytes=op.nbytes, workspace=op.workspace, type=op.type,
            where=op.where,
        )  # fmt: skip
        for read in op.reads:
            graph.add_edge(read, op.name, nbytes=_held_nbytes(trace, read))
    graph.add_node(RETURN, fn=RETURN, us=0.0)
    for _, value in trace.outputs:
        graph.add_edge(value, RETURN, nbytes=_held_nbytes(trace, value))
    return graph


def _held_nbytes(trace: Trace, value: str) -> int:
    return sum(trace.nbytes[storage] for storage in trace.op[value].holds)


def sources(graph: nx.DiGraph, values: Iterable[str], within: Collection[str]) -> set[str]:
    """Return the values and everything among `within` that they are computed from."""
    import networkx as nx

    def reads(name: str) -> Iterable[str]:
        return (read for read in graph.predecessors(name) if read in within) if name else values

    return {name for _, name in nx.generic_bfs_edges(graph, "", reads)}


def critical_path(graph: nx.DiGraph) -> list[str]:
    """Return the chain of dependent ops that takes longest, without `RETURN`."""
    import networkx as nx

    weighted = nx.DiGraph()
    weighted.add_weighted_edges_from((source, op, graph.nodes[op]["us"]) for source, op in graph.edges)
    weighted.add_weighted_edges_from(("", op, data["us"]) for op, data in graph.nodes(data=True))
    return [op for op in nx.dag_longest_path(weighted) if op not in ("", RETURN)]
