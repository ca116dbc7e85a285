"""A step with weights in blocks computes what the step does, to the bit where that was tried; other weights stay whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memgraph.capture.capture import capture, operands
from memgraph.graph.captured import Captured
from memgraph.graph.rewrite import rewrite
from memgraph.graph.summarize import summarize
from memgraph.slices.equal_bits import has_equal_bits
from memgraph.slices.row_blocks import in_row_blocks
from memgraph.slices.step_blocks import BlockRequest, in_blocks
from memgraph.slices.weights import weights_by_name
from memgraph.tensors.loss_outputs import select_losses
from passes import Link, Machine, Stream, Streaming, apply, check, make_plan, predict
from passes.analysis.reuse_gaps import ReuseGaps
from passes.lp.problem import PlanProblem
from passes.slices.row_blocks import rows_of_blocks
from tests.support.block_models import WIDTH, WORDS, Projection, Words, words

SIZES = (192, 384, 1536, WORDS - 1)


def step(model: nn.Module, *args: Tensor) -> tuple[Captured, list[Tensor]]:
    """Return a captured step, and the tensors that its graph reads."""
    return capture(model, args, {}, wanted=select_losses), [*operands(model, args, {}), torch.tensor(1.0)]


def names(model: nn.Module, *args: Tensor) -> set[str]:
    return set(weights_by_name(step(model, *args)[0]))


def test_products_and_lookups_can_be_cut() -> None:
    assert names(Words(), *words()) == {"token.weight", "layer.weight", "head.weight"}
    assert names(Projection(), torch.randn(8, WORDS)) == {"weight"}


class Scaled(Words):
    def forward(self, now: Tensor, then: Tensor) -> Tensor:
        return super().forward(now, then) + self.head.weight.square().mean()


class Counted(Words):
    def __init__(self) -> None:
        super().__init__()
        self.token.scale_grad_by_freq = True


class Half(Words):
    def forward(self, now: Tensor, then: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(now, then)


class Returned(Words):
    def forward(self, now: Tensor, then: Tensor) -> Any:
        return super().forward(now, then), self.head.weight * 2


@pytest.mark.parametrize(
    ("make", "whole"),
    [
        (lambda: Words(tied=True), {"token.weight", "head.weight"}),
        (Scaled, {"head.weight"}),
        (Counted, {"token.weight"}),
        (Half, {"layer.weight", "head.weight"}),
        (Returned, {"head.weight"}),
    ],
    ids=["tied", "also read as it is", "scaled by counts", "cast", "returned"],
)
def test_others_are_left_whole(make: Any, whole: set[str]) -> None:
    assert names(make(), *words()) == {"token.weight", "layer.weight", "head.weight"} - whole


def test_no_weight_of_a_convolution_or_a_norm_can_be_cut() -> None:
    net = nn.Sequential(nn.Conv1d(4, 8, 3), nn.Flatten(), nn.LayerNorm(48))
    assert names(net, torch.randn(2, 4, 8)) == set()


def test_frozen_weights_can_be_cut() -> None:
    model = Words()
    model.head.weight.requires_grad_(False)
    captured, _ = step(model, *words())
    assert weights_by_name(captured)["head.weight"].gradient is None


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("make", [Words, lambda: Words(bias=False, padding=2), Projection], ids=["words", "bare", "mm"])
def test_a_step_in_blocks_computes_what_the_step_does(make: Any, size: int) -> None:
    model = make()
    captured, tensors = step(model, *(words() if isinstance(model, Words) else (torch.randn(8, WORDS),)))
    weights = {name: each for name, each in weights_by_name(captured).items() if each.rows == WORDS}
    blocks = {name: rows_of_blocks(WORDS, size) for name in weights}
    cut = in_row_blocks(captured, blocks, weights)
    check(summarize(cut.graph.graph))
    with torch.no_grad():
        expected = captured.graph(*tensors)
        found = cut.graph(*(x for x in cut.in_blocks(cut.inputs, tensors) if x is not None))
    assert len(found) == len(cut.graph_outputs) == len(expected) + len(blocks) * (len(rows_of_blocks(WORDS, size)) - 1)
    is_equal = all(has_equal_bits(weight, size) for weight in weights.values())
    for role, whole in zip(captured.outputs, expected, strict=True):
        same = [
            x for x, its in zip(found, cut.graph_outputs, strict=True) if (its.kind, its.name) == (role.kind, role.name)
        ]
        joined = torch.cat(same) if len(same) > 1 else same[0]
        # Sums of 4,096 terms round once a block, at most.
        assert torch.equal(joined, whole) if is_equal else torch.allclose(joined, whole, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("share", [0.5, 0.2, 0.0])
def test_the_law_holds_for_plans_of_a_step_in_blocks(share: float) -> None:
    captured, _ = step(Words(), *words())
    weights = weights_by_name(captured)
    blocks = {name: rows_of_blocks(weights[name].rows, 384) for name in ("token.weight", "head.weight")}
    graph = in_row_blocks(captured, blocks, weights).graph.graph
    trace, machine = summarize(graph), Machine(1 << 40, link=Link(1000.0, 1000.0), streaming=Streaming(True))
    priced = replace(trace, ops=tuple(op if op.is_input else replace(op, us=100.0) for op in trace.ops))
    least = PlanProblem(ReuseGaps(priced), machine).least_nbytes
    budget = least + int(share * (predict(priced, machine).peak - least)) + (1 << 19)
    plan = make_plan(priced, replace(machine, budget=budget), seconds=5).plan
    applied = apply(trace, plan)
    assert any(isinstance(decision, Stream) for decision in plan)
    assert summarize(rewrite(graph, applied)) == applied


def test_bits_were_tried() -> None:
    weights = weights_by_name(step(Words(), *words())[0])
    head = weights["head.weight"]
    dy, w = torch.randn(8, WORDS), torch.randn(WORDS, WIDTH)
    for size in SIZES:
        total = dy[:, :size] @ w[:size]
        for first, last in rows_of_blocks(WORDS, size)[1:]:
            total.addmm_(dy[:, first:last], w[first:last])
        if has_equal_bits(head, size):
            assert torch.equal(total, dy @ w)
    assert has_equal_bits(weights["token.weight"], 192)  # nothing is added up across its rows


def test_what_rounds_is_cut_only_if_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    captured, _ = step(Words(), *words())
    monkeypatch.setattr("memgraph.slices.step_blocks.has_equal_bits", lambda weight, size: False)
    assert not in_blocks(captured, BlockRequest(1)).blocks
    cut = in_blocks(captured, BlockRequest(1, rounds=True))
    assert cut.rounded_blocks == set(cut.blocks) == {"token.weight", "head.weight"}


def test_weights_smaller_than_one_that_stays_whole_are_not_cut() -> None:
    assert in_blocks(step(Scaled(), *words())[0], BlockRequest(2)).blocks == {}
    assert in_blocks(step(Words(tied=True), *words())[0], BlockRequest(1)).blocks == {}


def test_a_saved_plan_has_its_blocks_if_the_step_has_its_weights() -> None:
    captured, _ = step(Words(), *words())
    assert in_blocks(captured, BlockRequest(saved=({"head.weight": 192},))).blocks == {
        "head.weight": rows_of_blocks(WORDS, 192)
    }
    for sizes in ({"other": 192}, {"head.weight": WORDS}, {"head.weight": 0}, {"head.weight": 3}):
        assert not in_blocks(captured, BlockRequest(saved=(sizes,))).blocks


def test_a_lookup_alone_equals_embedding() -> None:
    captured, tensors = step(nn.Embedding(WORDS, WIDTH), torch.arange(8))
    weights = weights_by_name(captured)
    cut = in_row_blocks(captured, {"weight": rows_of_blocks(WORDS, 192)}, weights)
    with torch.no_grad():
        found = cut.graph(
            *(x for x in cut.in_blocks(cut.inputs[:-1], tensors[:-1]) if x is not None), torch.ones(8, WIDTH)
        )
    assert torch.equal(found[0], F.embedding(torch.arange(8), tensors[0]))
