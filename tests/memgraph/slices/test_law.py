"""A slice does to the graph what it does to the text, and the graph computes what the step does.

summarize(sliced_graph(graph, unroll(summarize(graph), slice))) == unroll(summarize(graph), slice).trace
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, fx

from memgraph.capture.capture import capture, operands
from memgraph.graph.captured import Captured
from memgraph.graph.rewrite import copy_graph
from memgraph.graph.summarize import summarize
from memgraph.slices.sliced_graph import sliced_graph
from memgraph.slices.step_slices import _facts, write_losses_by_row
from memgraph.system.device import block_nbytes
from memgraph.tensors.loss_outputs import select_losses
from passes import Trace, check
from passes.slices.chain import Facts, find_chains
from passes.slices.hoist import can_hoist
from passes.slices.slice import Slice
from passes.slices.unroll import Unrolled, unroll
from tests.support.sliced_models import MODELS, made

CPU = torch.device("cpu")
SEEDS = 4  # the largest values


@cache
def step(name: str) -> tuple[Captured, fx.Graph, list[Tensor]]:
    """Return the captured step, its graph with losses by row, and what it is called with."""
    model, args, kwargs = made(name)
    captured = capture(model, args, kwargs, wanted=select_losses)
    graph = copy_graph(captured.graph.graph)
    write_losses_by_row(graph)
    return captured, graph, [*operands(model, args, kwargs), torch.tensor(0.7)]


def slices_of(trace: Trace, facts: Facts) -> Iterator[Slice]:
    """Yield the chains around the largest values of a step."""
    found = set[str]()
    for op in sorted((op for op in trace.ops if not op.is_input), key=lambda op: -op.nbytes)[:SEEDS]:
        for cut in find_chains(trace, facts, op.name, 2):
            assert cut.reruns or can_hoist(trace, cut.rule, facts)
            if str(cut) not in found:
                found.add(str(cut))
                yield cut


def carried_out(graph: fx.Graph, cut: Slice) -> tuple[Unrolled, fx.Graph]:
    """Return the step in a slice, as text and as a graph; both say the same."""
    unrolled = unroll(summarize(graph), cut, block_nbytes(1, CPU))
    check(unrolled.trace)
    sliced = sliced_graph(graph, unrolled)
    for one, other in zip(summarize(sliced).ops, unrolled.trace.ops, strict=True):
        assert one == other
    assert summarize(sliced) == unrolled.trace
    return unrolled, sliced


def results(captured: Captured, graph: fx.Graph, tensors: list[Tensor]) -> list[Tensor]:
    torch.manual_seed(2)
    with torch.no_grad():
        return list(fx.GraphModule(captured.graph, graph)(*[tensor.detach().clone() for tensor in tensors]))


def assert_near(ours: list[Tensor], theirs: list[Tensor]) -> None:
    """Compare outputs and gradients: sums over rows are added in another order."""
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        limit = 2e-6 * max(float(other.abs().max()), 1e-30)
        assert float((one - other).abs().max()) <= limit


@pytest.mark.parametrize("name", MODELS)
def test_the_graph_in_slices_is_the_text_in_slices(name: str) -> None:
    captured, graph, tensors = step(name)
    trace, facts, expected = summarize(graph), _facts(graph), results(captured, graph, tensors)
    found = list(slices_of(trace, facts))
    assert found
    for i, cut in enumerate(found):
        parts = (2, 3, 7)[i % 3]
        _, sliced = carried_out(graph, replace(cut, parts=parts))
        assert_near(results(captured, sliced, tensors), expected)


@pytest.mark.parametrize("parts", [2, 3, 7, 24])
@pytest.mark.parametrize("name", ["gpt2", "llama", "z-loss", "shifted labels", "two heads"])
def test_the_longest_chain_in_any_number_of_parts(name: str, parts: int) -> None:
    captured, graph, tensors = step(name)
    trace = summarize(graph)
    cut = max(slices_of(trace, _facts(graph)), key=lambda cut: len(cut.rules))
    _, sliced = carried_out(graph, replace(cut, parts=parts))
    assert_near(results(captured, sliced, tensors), results(captured, graph, tensors))


def test_a_slice_of_a_step_in_slices() -> None:
    """Each head is a chain of both phases, with a tangent of its own, and reads rows of the same labels."""
    captured, graph, tensors = step("two heads")
    trace, facts = summarize(graph), _facts(graph)
    large = [cut for cut in slices_of(trace, facts) if len(cut.rules) > 5 and cut.rows == 24]
    first, second = (next(cut for cut in large if name in cut.rule) for name in ("mm", "mm_1"))
    assert first.rule.keys().isdisjoint(second.rule)
    _, once = carried_out(graph, replace(first, parts=3))
    unrolled, twice = carried_out(once, replace(second, parts=2))
    assert_near(results(captured, twice, tensors), results(captured, graph, tensors))
    assert [op.name for op in unrolled.trace.ops if op.type == "f32[24, 96]"] == []


def test_losses_by_row_have_the_same_bits() -> None:
    for name in ("ignored labels", "a sum", "a mask", "gpt2"):
        captured, graph, tensors = step(name)
        whole = results(captured, captured.graph.graph, tensors)
        assert all(map(torch.equal, results(captured, graph, tensors), whole))


@pytest.mark.parametrize(
    "name", ["cross entropy", "ignored labels", "a sum", "tied weights", "two heads", "gpt2", "llama"]
)
def test_a_loss_in_slices_has_the_same_bits(name: str) -> None:
    """It adds up the same numbers in the same order."""
    captured, graph, tensors = step(name)
    expected = results(captured, captured.graph.graph, tensors)
    for cut in slices_of(summarize(graph), _facts(graph)):
        if any("log_softmax" in op for op in cut.rule):
            _, sliced = carried_out(graph, replace(cut, parts=3))
            loss = [output.kind for output in captured.outputs].index("output")
            assert torch.equal(results(captured, sliced, tensors)[loss], expected[loss])
