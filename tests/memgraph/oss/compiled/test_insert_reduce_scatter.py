"""Exchanges between ranks in a captured graph: the law holds of them, and each rank is handed its part of the sums.

The other rank is made up: it has what this one has, so that a mean over both is what this one has itself.
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
from memgraph.oss.compiled.insert_reduce_scatter import insert_reduce_scatters
from memgraph.oss.sharded_grads import GradBucket, Stretch
from memgraph.runtime.step_run import StepRun
from memgraph.tensors.loss_outputs import select_losses
from passes import Machine, Trace
from passes.order.comm_order import place_collectives
from passes.order.microbatch_order import order_by_section
from tests.memgraph.graph.test_law import holds, thorough
from tests.support.law_models import Subject, corrected, price, subject

RANKS = 2
NAMES = ("attention", "parts", "pictures")


def grad_buckets(its: Subject) -> list[GradBucket]:
    """Return a bucket for half of each parameter except the first, and two more for all the rest."""
    named = list(its.model.named_parameters())
    found, rests = list[GradBucket](), [list[Stretch](), list[Stretch]()]
    for i, (name, parameter) in enumerate(named):
        cut = parameter.numel() // (2 * RANKS) * RANKS
        if i and cut:
            found.append(GradBucket(len(found), (Stretch(name, 0, cut, 0),), cut, cut // RANKS, room=8 * cut))
        rest, begin = rests[i % 2], cut if i else 0
        at = rest[-1].at + rest[-1].end - rest[-1].begin + 1 if rest else 0
        rest.append(Stretch(name, begin, parameter.numel(), at))
    for rest in rests:
        size = (rest[-1].at + rest[-1].end - rest[-1].begin + RANKS) // RANKS * RANKS
        found.append(GradBucket(len(found), (*rest, Stretch("another model's", 0, 3, size)), size + 4, size // 2 + 2))
    return found


@cache
def stepped(name: str, adds: bool) -> tuple[Captured, fx.Graph, Trace]:
    its = subject(name)
    captured = insert_reduce_scatters(capture(its.model, its.args, its.kwargs, wanted=select_losses), grad_buckets(its))
    graph = corrected(captured, adds)
    return captured, graph, order_by_section(place_collectives(summarize(graph, price)), Machine(0))


@pytest.mark.long
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("name", NAMES)
@thorough
@given(data=st.data())
def test_the_rewritten_graph_is_what_the_applied_text_says(name: str, adds: bool, data: st.DataObject) -> None:
    _, graph, trace = stepped(name, adds)
    holds(graph, trace, data)


class FakeExchange:
    """Sums with a rank that has the same."""

    def __init__(self) -> None:
        self.under_way: dict[int, Tensor] = {}

    def begin(self, bucket: int, sent: Tensor) -> None:
        self.under_way[bucket] = sent

    def end(self, bucket: int) -> Tensor:
        sent = self.under_way.pop(bucket)
        return sent[len(sent) // RANKS :].clone()  # of rank 1


@pytest.mark.long
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_each_rank_has_its_part_of_the_gradients(name: str, adds: bool) -> None:
    its = subject(name)
    its.again()
    captured, graph, trace = stepped(name, adds)
    run = StepRun(partition(rewrite(graph, trace), captured.graph), None)
    run.exchange = exchange = FakeExchange()
    outputs = run.forward(its.tensors, sum(role.kind == "output" for role in captured.outputs))
    roles = [role for role in captured.outputs if role.kind != "output"]
    sizes = {bucket.bucket: bucket.part for bucket in grad_buckets(its)}
    there = [torch.ones(sizes[role.index]) for role in roles] if adds else []
    found: list[Any] = run.backward([torch.ones_like(outputs[0])], there, keep=False)
    assert [role.kind for role in roles] == ["shard"] * len(grad_buckets(its)) and not exchange.under_way
    its.again()
    its.model(*its.args, **its.kwargs).backward()
    gradients = {name: parameter.grad for name, parameter in its.model.named_parameters()}
    for role, part in zip(roles, found, strict=True):
        assert torch.equal(part, expected(grad_buckets(its)[role.index], gradients) + adds)


def expected(bucket: GradBucket, gradients: dict[str, Tensor | None]) -> Tensor:
    packed = torch.zeros(bucket.size)
    for stretch in bucket.stretches:
        gradient = gradients.get(stretch.name)
        if gradient is not None:
            packed[stretch.at : stretch.at + stretch.end - stretch.begin] = gradient.flatten()[
                stretch.begin : stretch.end
            ]
    return packed[bucket.part :]
