"""A report is a graph that other programs read."""

from __future__ import annotations

from pathlib import Path

import networkx as nx
import pytest

from memgraph.report.report import Report
from passes import Machine, PlanResult, apply, parse_plan, predict
from tests.memgraph.report.test_golden_reports import TRAIN


@pytest.mark.long
def test_the_planned_step_is_written_as_graphml_and_read_back(tmp_path: Path) -> None:
    machine = Machine(33_000_000)
    plan = parse_plan("recompute h: before dv")
    captured, forecast = predict(TRAIN, machine), predict(apply(TRAIN, plan), machine)
    graph = Report(machine, PlanResult(plan, captured, forecast)).to_networkx()
    nx.write_graphml(graph, tmp_path / "step.graphml")
    read = nx.read_graphml(tmp_path / "step.graphml")
    assert read.nodes == graph.nodes and set(read.edges) == set(graph.edges)
    assert max(facts.get("live_nbytes", 0) for _, facts in graph.nodes(data=True)) == forecast.peak
    assert ("h__1", "dv") in graph.edges and ("h", "dv") not in graph.edges
