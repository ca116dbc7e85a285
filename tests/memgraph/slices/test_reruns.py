"""Chains whose forward ops run again in backward: MLPs and attention of a small transformer beside eager.

Products of fewer rows may take another kernel, and sums over rows are added in another order: results are eager's but
for the last bits.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memgraph
from memgraph.profile.memory_meter import measure_peak, resident_bytes
from tests.support.sliced_models import Blocks, rows
from tests.support.sliced_training import NEAR, ROOM, assert_kept, assert_near

LENGTH = 64  # of two sequences
DROPOUT = [{}, {"drop": 0.2}, {"drop": 0.2, "inner": 0.3}]


def blocks(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return Blocks(**options)


def run(model: Any, factor: float = 1.0) -> list[Tensor]:
    """Return the loss, and the gradient of the input."""
    torch.manual_seed(1)
    x = rows(2, LENGTH).requires_grad_()
    loss = model(x) * factor
    loss.backward()
    assert x.grad is not None
    return [loss.detach(), x.grad]


def beside_eager(module: nn.Module, budget: int, factor: float = 1.0, **wishes: Any) -> memgraph.CompiledModule:
    """Run a step in slices and with the plain module; compare loss and gradients."""
    eager = copy.deepcopy(module)
    wishes.setdefault("offload", None)
    model = memgraph.compile(module, budget, **wishes)
    for one, other in zip(run(model, factor), run(eager, factor), strict=True):
        assert float((one - other).abs().max()) <= NEAR * float(other.abs().max())
    assert_near(module, eager)
    return model


def smallest(module: nn.Module, slices: Any) -> int:
    """Return the least budget for which a plan is found."""
    held = resident_bytes(module.parameters())
    with pytest.raises(memgraph.BudgetError) as caught:
        memgraph.plan(
            copy.deepcopy(module), rows(2, LENGTH), budget=held + 10**4, slices=slices, offload=None, time_limit=1
        )
    return caught.value.smallest


def fns(model: memgraph.CompiledModule, whole: memgraph.CompiledModule) -> list[set[str]]:
    """Return the functions of each slice's ops."""
    ops = whole.plan.forecast.trace.op
    return [{ops[name].fn.split(".")[1] for name in cut.rule} for cut in model.plan.slices]


@pytest.mark.long
@pytest.mark.parametrize("options", DROPOUT[:2], ids=str)
def test_an_mlp_runs_in_parts_in_both_phases(options: dict[str, Any]) -> None:
    module = blocks(**options)
    whole = beside_eager(blocks(**options), ROOM)
    model = beside_eager(module, ROOM, slices={"blocks.0.up": 4})
    (cut,) = model.plan.slices
    assert cut.reruns and cut.parts == 4 and f", values from {cut.reruns} bytes again: " in str(cut)
    assert fns(model, whole)[0] >= {"addmm", "gelu", "gelu_backward", "mm"}
    names = {op.name.rpartition("__")[2] for op in model.plan.forecast.trace.ops}
    assert {"p1", "p4", "r1", "r4"} <= names  # forward ops stand in both blocks
    assert model.plan.peak < whole.plan.peak
    assert_kept(model)


@pytest.mark.long
@pytest.mark.parametrize("options", DROPOUT, ids=str)
def test_scores_of_attention_are_never_whole(options: dict[str, Any]) -> None:
    whole = beside_eager(blocks(**options), ROOM)
    model = beside_eager(blocks(**options), ROOM, slices={"blocks.0": 4, "blocks.1": 3})
    assert [(cut.reruns > 0, cut.parts) for cut in model.plan.slices] == [(True, 4), (True, 3)]
    assert all(found >= {"_softmax", "_softmax_backward_data", "bmm"} for found in fns(model, whole))
    scores = 2 * 2 * LENGTH * LENGTH * 4
    assert any(op.nbytes == scores for op in whole.plan.forecast.trace.ops)
    assert not any(op.nbytes == scores for op in model.plan.forecast.trace.ops)
    assert model.plan.peak < whole.plan.peak
    assert_kept(model)


@pytest.mark.long
def test_attention_and_mlp_of_each_block_run_in_parts() -> None:
    asked = {"blocks.0": 4, "blocks.1": 2, "blocks.0.up": 3, "blocks.1.up": 2}
    model = beside_eager(blocks(drop=0.2), ROOM, slices=asked)
    assert [(cut.reruns > 0, cut.parts) for cut in model.plan.slices] == [(True, 4), (True, 2), (True, 3), (True, 2)]
    assert_kept(model)


@pytest.mark.long
@pytest.mark.parametrize("factor", [3.0, 0.0])
def test_a_loss_may_be_scaled(factor: float) -> None:
    beside_eager(blocks(drop=0.2), ROOM, factor, slices={"blocks.0": 4, "blocks.1.up": 3})


@pytest.mark.long
@pytest.mark.parametrize("options", DROPOUT, ids=str)
def test_auto_takes_them_where_no_other_plan_fits(options: dict[str, Any]) -> None:
    module = blocks(**options)
    without, with_slices = smallest(module, None), smallest(module, "auto")
    assert with_slices < 0.8 * without
    budget = (with_slices + without) // 2
    model = beside_eager(module, budget, slices="auto")
    assert model.plan.slices and all(cut.reruns for cut in model.plan.slices)
    assert_kept(model)


@pytest.mark.long
def test_draws_are_eagers_in_both_phases() -> None:
    """No op that draws is in a chain, nor runs again; the generator ends where eager's does."""
    model = memgraph.compile(blocks(drop=0.2, inner=0.3), ROOM, slices={"blocks.0": 4}, offload=None)
    run(model)
    ours = torch.rand(3)
    run(blocks(drop=0.2, inner=0.3))
    assert torch.equal(ours, torch.rand(3))
    drawing = [op for op in model.plan.forecast.trace.ops if op.draws]
    assert len(drawing) == 6 and not any(op.name in cut.rule for cut in model.plan.slices for op in drawing)


@pytest.mark.long
@pytest.mark.usefixtures("given_up")
def test_reruns_beside_recompute_and_offload(tmp_path: Any) -> None:
    asked = {"blocks.0": 4, "blocks.1.up": 3}
    model = beside_eager(blocks(drop=0.2), ROOM, slices=asked, offload="disk", spill_dir=str(tmp_path))
    assert {type(decision).__name__ for decision in model.plan.plan} >= {"Offload", "Recompute"}


@pytest.mark.long
@pytest.mark.parametrize("twice", [False, True], ids=["once", "backward twice"])
def test_gradients_add_up_over_calls(twice: bool) -> None:
    module = blocks(drop=0.2)
    eager = copy.deepcopy(module)
    model = memgraph.compile(module, ROOM, slices={"blocks.0": 4, "blocks.1.up": 3}, offload=None)
    for each in (model, eager):
        torch.manual_seed(1)
        for seed in range(3):
            loss = each(rows(2, LENGTH).roll(seed, 1))
            (loss * 3.0).backward(retain_graph=twice)
            if twice:
                (loss * 0.25).backward()
    assert_near(module, eager)
    if not twice:  # a graph that is retained keeps its values
        assert_kept(model)


@pytest.mark.long
def test_a_saved_plan_has_them() -> None:
    first = beside_eager(blocks(), ROOM, slices={"blocks.0": 4})
    again = beside_eager(blocks(), ROOM, plan=first.plan.to_json())
    assert again.plan.slices == first.plan.slices and again.plan.slices[0].reruns
    assert_kept(again)


@pytest.mark.long
def test_bytes_beside_eager() -> None:
    _, allocated = measure_peak(lambda: run(blocks()))
    assert allocated is not None
    model = beside_eager(blocks(), ROOM, slices={"blocks.0": 8, "blocks.1": 8, "blocks.0.up": 8, "blocks.1.up": 8})
    module = blocks()
    above = model.plan.peak - resident_bytes([*module.parameters(), rows(2, LENGTH)])
    assert above < 0.5 * allocated.peak
