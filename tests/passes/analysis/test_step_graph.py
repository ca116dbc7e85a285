"""The graph of a step has its ops, its prices and its dependencies, and no others."""

from __future__ import annotations

import networkx as nx
from hypothesis import given

from passes import Trace, parse
from passes.analysis.step_graph import RETURN, critical_path, sources, step_graph
from tests.support.strategies import traces

STEP = parse("""
    forward:
    x = input()  # f32[8] | makes x:32
    a = relu(x)  # f32[8] | makes a:32 | 10.0 us
    v = view(a)  # f32[2, 4] | holds a
    b = conv(x)  # f32[8] | makes b:32 | 90.0 us
    c = add(v, b)  # f32[8] | makes c:32 | 5.0 us
    return output c
""")


def test_ops_are_nodes_and_reads_are_edges_with_their_bytes() -> None:
    graph = step_graph(STEP)
    assert graph.nodes["b"] == {
        "fn": "conv", "phase": "forward", "us": 90.0, "nbytes": 32, "workspace": 0, "type": "f32[8]", "where": "",
    }  # fmt: skip
    assert sorted(graph.edges(data="nbytes")) == [
        ("a", "v", 32), ("b", "c", 32), ("c", RETURN, 32), ("v", "c", 32), ("x", "a", 32), ("x", "b", 32),
    ]  # fmt: skip


def test_the_critical_path_is_the_chain_that_takes_longest() -> None:
    assert critical_path(step_graph(STEP)) == ["x", "b", "c"]


def test_sources_end_where_they_are_not_looked_for() -> None:
    assert sources(step_graph(STEP), ["c"], within={"v", "b"}) == {"c", "v", "b"}
    assert sources(step_graph(STEP), ["c"], within=STEP.op) == set(STEP.op)


@given(traces())
def test_the_graph_is_acyclic_and_its_longest_chain_is_no_longer_than_the_step(trace: Trace) -> None:
    graph = step_graph(trace)
    assert nx.is_directed_acyclic_graph(graph)
    assert set(graph) == {*trace.op, RETURN}
    assert all(set(graph.predecessors(op.name)) == set(op.reads) for op in trace.ops)
    assert sum(trace.op[name].us for name in critical_path(graph)) <= sum(op.us for op in trace.ops) * (1 + 1e-9)
