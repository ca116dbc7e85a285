"""Gathers in a captured graph: the law holds of them, and each parameter is whole when it is read first.

The other ranks are made up: what they have updated is what was in the parameters, which are NaN until it has come.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx

from memgraph.capture.capture import capture
from memgraph.graph.captured import Captured
from memgraph.graph.halves.partition import partition
from memgraph.graph.rewrite import rewrite
from memgraph.graph.summarize import summarize
from memgraph.oss.compiled.insert_all_gather import ForwardBucket, insert_all_gathers
from memgraph.runtime.step_run import StepRun
from memgraph.tensors.loss_outputs import select_losses
from passes import Machine, Network, Trace
from passes.order.comm_order import place_collectives
from passes.order.microbatch_order import order_by_section
from tests.memgraph.graph.test_law import holds, thorough
from tests.support.law_models import Subject, corrected, price, subject


def arriving(its: Subject) -> list[ForwardBucket]:
    """Every other parameter in a bucket alone, the rest by threes in packed ones, the last first."""
    named = list(its.model.named_parameters())
    found = [ForwardBucket(i, (name,), p.numel(), 0) for i, (name, p) in enumerate(named[::2])]
    rest = named[1::2][::-1]
    for begin in range(0, len(rest), 3):
        some = dict(rest[begin : begin + 3])
        size = sum(parameter.numel() for parameter in some.values())
        found.append(ForwardBucket(len(found), tuple(some), size, room=4 * size))
    return found


@cache
def stepped(name: str, adds: bool = False, at_once: bool = False) -> tuple[Captured, fx.Graph, Trace]:
    its = subject(name)
    captured = insert_all_gathers(capture(its.model, its.args, its.kwargs, wanted=select_losses), arriving(its))
    graph = corrected(captured, adds)
    return (
        captured,
        graph,
        order_by_section(
            place_collectives(summarize(graph, price), at_once),
            Machine(0, network=Network(interference=float(at_once))),
        ),
    )


@pytest.mark.long
@pytest.mark.parametrize("name, adds", [("attention", False), ("parts", True)])
@thorough
@given(data=st.data())
def test_the_rewritten_graph_is_what_the_applied_text_says(name: str, adds: bool, data: st.DataObject) -> None:
    _, graph, trace = stepped(name, adds)
    holds(graph, trace, data)


class Others:
    """They have what was in the parameters of these names."""

    def __init__(self, its: Subject) -> None:
        named = dict(its.model.named_parameters())
        self.parameters = {one.bucket: [named[name] for name in one.names] for one in arriving(its)}
        self.updated = {parameter: parameter.detach().clone() for parameter in named.values()}
        self.started: list[int] = []
        self.ended: list[int] = []
        for parameter in named.values():
            parameter.data.fill_(torch.nan)

    def begin(self, bucket: int) -> None:
        self.started.append(bucket)

    def end(self, bucket: int) -> None:
        assert bucket in self.started
        self.ended.append(bucket)
        for parameter in self.parameters[bucket]:
            parameter.data.copy_(self.updated[parameter])


def run(name: str, at_once: bool, gather: Any) -> list[Tensor]:
    """The outputs and gradients of a step with everything as it was before the first."""
    its = subject(name)
    captured, graph, trace = stepped(name, at_once=at_once)
    run = StepRun(partition(rewrite(graph, trace), captured.graph), None)
    its.again()
    if gather:
        run.gather = gather(its)
    outputs = run.forward(its.tensors, sum(role.kind == "output" for role in captured.outputs))
    return [*outputs, *run.backward([torch.ones_like(outputs[0])], [], keep=False)]


@pytest.mark.long
@pytest.mark.parametrize("name, at_once", [("attention", False), ("parts", True), ("pictures", False)])
def test_parameters_are_whole_when_they_are_read_and_without_others_nothing_is_done(name: str, at_once: bool) -> None:
    others: list[Others] = []

    def gather(its: Subject) -> Others:
        others.append(Others(its))
        return others[0]

    found, plain = run(name, at_once, gather), run(name, at_once, None)
    assert all(map(torch.equal, found, plain)) and not any(one.isnan().any() for one in found)
    assert sorted(others[0].started) == sorted(others[0].ended) == sorted(one.bucket for one in arriving(subject(name)))
