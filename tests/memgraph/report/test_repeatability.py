"""A report of a GPU's step names the ops that need not give the same bits twice."""

from __future__ import annotations

import inspect
from dataclasses import replace

import torch

import memgraph
from memgraph.report.printout import verdict
from memgraph.report.repeatability import UNREPEATABLE, repeatability, unrepeatable_ops
from memgraph.report.tables import mb
from passes import Op, Trace

STEP = Trace(
    (
        Op("x", "input"),
        Op("a", "aten.index_add.default", ("x",), type="f32[8]"),
        Op("b", "aten._scaled_dot_product_flash_attention_backward.default", ("x",), type="bf16[8], bf16[8], bf16[8]"),
        Op("c", "aten._scaled_dot_product_flash_attention_backward.default", ("x",), type="bf16[8], bf16[8], bf16[8]"),
        Op("d", "aten.cumsum.default", ("x",), type="i64[8]"),
        Op("e", "aten.cumsum.default", ("x",), type="bf16[8]"),
        Op("f", "aten.mm.default", ("x",), type="f32[8]"),
        Op("g", "getitem", ("x",), type="f32[8]"),
    )
)


def test_each_of_these_ops_is_one_of_torchs() -> None:
    assert [name for name in sorted(UNREPEATABLE) if not hasattr(torch.ops.aten, name)] == []


def test_ops_that_add_in_any_order_are_counted_by_name() -> None:
    assert unrepeatable_ops(STEP) == {
        "index_add": 1, "_scaled_dot_product_flash_attention_backward": 2, "cumsum": 1,
    }  # fmt: skip


def test_on_a_cpu_eager_gives_the_same_twice() -> None:
    assert repeatability(STEP, "cpu") == []
    assert repeatability(replace(STEP, ops=(*STEP.ops[:1], *STEP.ops[-2:])), "cuda:0") == []


def test_a_report_of_a_gpu_names_them_and_what_to_do() -> None:
    model = torch.nn.Conv2d(3, 4, 3)
    report = memgraph.plan(model, torch.randn(2, 3, 8, 8), budget="1GB")
    assert "the same twice" not in verdict(report)
    there = replace(report, machine=replace(report.machine, device="cuda:0"))
    assert "use_deterministic_algorithms(True) is set: convolution_backward" in verdict(there)


def test_nothing_is_compiled_unless_it_is_asked_for() -> None:
    for function in (memgraph.compile, memgraph.plan, memgraph.sweep):
        assert inspect.signature(function).parameters["lower"].default is None


def test_a_report_of_a_gpu_says_what_torchs_allocator_would_hold_until_it_was_measured() -> None:
    report = memgraph.plan(torch.nn.Linear(64, 64), torch.randn(32, 64), budget="1GB")
    assert "by simulation" not in str(report)
    there = replace(report, machine=replace(report.machine, device="cuda:0"))
    found = there.allocator()
    sizes = f"give out {mb(found.given)} and hold {mb(found.reserved)}, by simulation"
    assert sizes in " ".join(str(there).split())
    assert "by simulation" not in str(replace(there, held=1 << 20, blocks=1 << 19))
