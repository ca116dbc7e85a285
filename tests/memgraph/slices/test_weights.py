"""A step with weights in blocks computes what the step does, to the bit where that was tried; other weights stay whole."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memgraph.capture.capture import capture, operands
from memgraph.graph.accumulate_grads import mark_hooked_grads
from memgraph.graph.captured import Captured
from memgraph.graph.rewrite import rewrite
from memgraph.graph.summarize import summarize
from memgraph.microbatch.microbatches import MicroBatches
from memgraph.profile.memory_meter import measure_peak
from memgraph.slices.step_blocks import (
    BlockRequest,
    BlockTrials,
    has_equal_bits,
    in_blocks,
    in_row_blocks,
    trial_nbytes,
)
from memgraph.slices.weights import weights_by_name, whole_weights
from memgraph.tensors.loss_outputs import select_losses
from passes import Link, Machine, Stream, Streaming, apply, check, make_plan, predict
from passes.analysis.reuse_gaps import ReuseGaps
from passes.lp.problem import PlanProblem
from passes.order.microbatch_order import order_like
from passes.slices.row_blocks import rows_of_blocks
from passes.slices.whole_weight import Reason
from tests.support.block_models import WIDTH, WORDS, Projection, Words, words

SIZES = (192, 384, 1536, WORDS - 1)


def step(model: nn.Module, *args: Tensor) -> tuple[Captured, list[Tensor]]:
    """Return a captured step, and the tensors that its graph reads."""
    return capture(model, args, {}, wanted=select_losses), [*operands(model, args, {}), torch.tensor(1.0)]


def in_parts(count: int) -> nn.Module:
    return MicroBatches(Words(), count, "mean")


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


class Frequent(Words):
    """A tied weight, of so many tokens that the terms of its gradient are made of more than it."""

    def __init__(self) -> None:
        super().__init__(tied=True)

    def forward(self, now: Tensor, then: Tensor) -> Tensor:
        return super().forward(now.repeat(64), then.repeat(64))


class Read(Words):
    def forward(self, now: Tensor, then: Tensor) -> Tensor:
        return super().forward(now, then) + self.head.weight.detach().sum()


@pytest.mark.parametrize(
    ("make", "whole"),
    [
        (Scaled, {"head.weight": (Reason.READ, "aten.pow.Tensor_Scalar")}),
        (Read, {"head.weight": (Reason.READ, "aten.sum.default")}),
        (Counted, {"token.weight": (Reason.GRADIENT, "aten.embedding_dense_backward.default")}),
        (Half, dict.fromkeys(("layer.weight", "head.weight"), (Reason.CAST, "aten._to_copy.default"))),
        (Returned, {"head.weight": (Reason.READ, "aten.mul.Tensor")}),
        (Frequent, {"token.weight": (Reason.TERMS, "")}),
    ],
    ids=["also read as it is", "summed", "scaled by counts", "cast", "returned", "tied, with many tokens"],
)
def test_others_are_left_whole(make: Any, whole: dict[str, tuple[Reason, str]]) -> None:
    captured = step(make(), *words())[0]
    matrices = {name: each for name, each in whole_weights(captured).items() if name.endswith(".weight")}
    assert {name: (each.reason, each.detail) for name, each in matrices.items()} == whole
    assert not weights_by_name(captured).keys() & whole.keys()


def test_the_gradient_of_a_tied_weight_has_two_terms() -> None:
    weight = weights_by_name(step(Words(tied=True), *words())[0])["token.weight"]
    assert len(weight.reads) == 3 and len(weight.terms) == 2 and len(weight.sums) == 1


def test_what_changes_before_the_last_term_keeps_a_weight_whole() -> None:
    captured, _ = step(Words(tied=True), *words())
    early = weights_by_name(captured)["token.weight"].terms[0]
    with captured.graph.graph.inserting_after(early):
        changed = captured.graph.graph.call_function(torch.ops.aten.neg_.default, (early.all_input_nodes[1],))
    changed.meta = {"val": early.all_input_nodes[1].meta["val"], "phase": "backward"}
    assert whole_weights(captured)["token.weight"].reason == Reason.WRITTEN


def test_a_hook_keeps_a_weight_whole() -> None:
    captured, _ = step(Words(), *words())
    mark_hooked_grads(captured, {"head.weight"})
    assert whole_weights(captured)["head.weight"].reason == Reason.WATCHED


def test_no_weight_of_a_convolution_or_a_norm_can_be_cut() -> None:
    net = nn.Sequential(nn.Conv1d(4, 8, 3), nn.Flatten(), nn.LayerNorm(48))
    captured, _ = step(net, torch.randn(2, 4, 8))
    assert not weights_by_name(captured)
    assert {each.reason for each in whole_weights(captured).values()} == {Reason.LAYOUT}


def test_frozen_weights_can_be_cut() -> None:
    model = Words()
    model.head.weight.requires_grad_(False)
    captured, _ = step(model, *words())
    assert weights_by_name(captured)["head.weight"].gradient is None


@pytest.mark.long
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "make",
    [Words, lambda: Words(bias=False, padding=2), Projection, lambda: Words(tied=True), lambda: in_parts(3)],
    ids=["words", "bare", "mm", "tied", "micro-batches"],
)
def test_a_step_in_blocks_computes_what_the_step_does(make: Any, size: int) -> None:
    model = make()
    captured, tensors = step(model, *((torch.randn(8, WORDS),) if isinstance(model, Projection) else words()))
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


@pytest.mark.long
@pytest.mark.parametrize("make", [Words, lambda: Words(tied=True), lambda: in_parts(2)], ids=["words", "tied", "parts"])
@pytest.mark.parametrize("share", [0.5, 0.2, 0.0])
def test_the_law_holds_for_plans_of_a_step_in_blocks(make: Any, share: float) -> None:
    captured, _ = step(make(), *words())
    weights = weights_by_name(captured)
    blocks = {name: rows_of_blocks(each.rows, 384) for name, each in weights.items() if each.rows == WORDS}
    graph = in_row_blocks(captured, blocks, weights).graph.graph
    trace, machine = summarize(graph), Machine(1 << 40, link=Link(1000.0, 1000.0), streaming=Streaming(True))
    priced = replace(trace, ops=tuple(op if op.is_input else replace(op, us=100.0) for op in trace.ops))
    least = PlanProblem(ReuseGaps(priced), machine).least_nbytes
    budget = least + int(share * (predict(priced, machine).peak - least)) + (1 << 19)
    result = make_plan(priced, replace(machine, budget=budget), seconds=5)
    applied, plan = apply(order_like(trace, result.captured.trace), result.plan), result.plan
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


def test_a_trial_takes_what_is_forecast_for_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEMGRAPH_CACHE", str(tmp_path))
    weights = weights_by_name(step(Words(), *words())[0])
    for name in ("token.weight", "head.weight"):
        forecast = trial_nbytes(weights[name], 192)
        _, allocated = measure_peak(partial(has_equal_bits, weights[name], 192))
        assert allocated is not None
        assert 0 < allocated.peak - 8192 <= forecast  # masks of comparisons
        assert trial_nbytes(weights[name], 192) == 0


@pytest.mark.long
def test_a_trial_that_exceeds_the_budget_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MEMGRAPH_CACHE", "")
    captured, _ = step(Words(), *words())
    for room, times in ((1 << 30, 0), (1 << 20, 1)):
        caplog.clear()
        assert in_blocks(captured, BlockRequest(1, has_equal_bits=BlockTrials(room))).blocks
        assert len(caplog.records) == times
    assert "planning goes beyond the budget" in caplog.text and "the budget leaves 1.0 MB" in caplog.text


def test_what_was_tried_before_needs_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MEMGRAPH_CACHE", str(tmp_path))
    captured, _ = step(Words(), *words())
    for room in (1 << 30, -1):
        assert in_blocks(captured, BlockRequest(1, has_equal_bits=BlockTrials(room))).blocks
    assert not caplog.records


def test_what_rounds_is_cut_only_if_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    captured, _ = step(Words(), *words())
    monkeypatch.setattr("memgraph.slices.step_blocks.has_equal_bits", lambda weight, size: False)
    left = in_blocks(captured, BlockRequest(1))
    assert not left.blocks and {each.reason for each in left.whole_weights} == {Reason.BITS}
    assert {each.weight for each in left.whole_weights} == {"token.weight", "head.weight"}
    cut = in_blocks(captured, BlockRequest(1, rounds=True))
    assert cut.rounded_blocks == set(cut.blocks) == {"token.weight", "head.weight"}


def test_weights_smaller_than_one_that_stays_whole_are_not_cut() -> None:
    left = in_blocks(step(Scaled(), *words())[0], BlockRequest(2))
    assert left.blocks == {}
    reasons = {each.weight: (each.reason, each.detail) for each in left.whole_weights}
    assert reasons["token.weight"] == (Reason.SMALLER, "head.weight")
    assert reasons["head.weight"][0] == Reason.READ and set(reasons) == {"token.weight", "head.weight"}


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
