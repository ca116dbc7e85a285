"""A report says what rounds otherwise than in eager, and of a GPU's step which ops need not give the same bits twice."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memgraph
from memgraph.report.printout import verdict
from memgraph.report.repeatability import NAMED, UNREPEATABLE, repeatability, unrepeatable_ops
from memgraph.report.report import Report
from memgraph.report.report_data import RowBlocks
from memgraph.report.tables import mb
from passes import Link, Machine, Offload, PlanResult, Trace, apply, parse, parse_plan, predict
from passes.slices.slice import parse_slice

STEP = parse("""
    forward:
    x = input()  # f32[8] | makes x:32
    s = state()  # u8[64] | makes s:64
    a = aten.index_add.default(x, x, x)  # f32[8] | makes a:32
    d = aten.cumsum.default(x)  # i64[8] | makes d:64
    e = aten.cumsum_.default(x)  # bf16[8] | holds x
    m = aten.median.dim(x)  # f32[], i64[] | makes m.0:4, m.1:8
    n = aten.median.default(x)  # f32[] | makes n:4
    c = memgraph_guards.bincount.default(d)  # i64[8] | makes c:64
    v = aten.scatter.value(x, d)  # f32[8] | makes v:32
    backward:
    z = aten.new_zeros.default(x)  # f32[8] | makes z:32
    p = aten.index_put.default(z, d, a)  # f32[8] | makes p:32
    f = aten._flash_attention_backward.default(x)  # f32[8] | makes f:32
    g = aten._flash_attention_backward.default(x)  # f32[8] | makes g:32
    return output a, gradient p
""")
EXACT = parse("""
    forward:
    x = input()  # f32[8] | makes x:32
    a = aten.mm.default(x, x)  # f32[8] | makes a:32
    return output a
""")
# Named by torch, and not in a step that is captured on a GPU.
OF_NO_STEP = {
    "torch.bmm": "of sparse tensors, which are not captured",
    "torch.Tensor.resize_": "of quantized tensors, which have no gradient",
}
INDICES = torch.tensor([0, 1, 1, 2])


def made(trace: Trace, device: str = "cuda:0", decisions: str = "", **facts: Any) -> Report:
    """Return the report of a step that is given as text."""
    machine = Machine(1 << 20, device=device, tier="host", link=Link(out=10_000.0, back=10_000.0))
    plan = parse_plan(decisions)
    choice = PlanResult(plan, predict(trace, machine), predict(apply(trace, plan), machine))
    return Report(machine, choice, **facts)


def on_gpu(report: Report) -> str:
    """Return the verdict of a step as a GPU's report would have it."""
    return verdict(replace(report, machine=replace(report.machine, device="cuda:0")))


def documented() -> set[str]:
    """Return what the installed torch names as not repeatable unless deterministic algorithms are used."""
    text = inspect.getdoc(torch.use_deterministic_algorithms) or ""
    begin, end = text.index("The following normally-nondeterministic"), text.index("In addition, several operations")
    assert text[begin:end].count("The following normally-nondeterministic") == 2
    return set(re.findall(r":(?:class|func|meth|attr):`~?(torch\.[\w.]+)`", text[begin:end]))


# --- which ops


def test_each_of_these_ops_is_one_of_torchs() -> None:
    missing = []
    for each in sorted(UNREPEATABLE):
        name, _, overload = each.partition(".")
        packet = getattr(torch.ops.aten, name, None)
        if packet is None or (overload and overload not in packet.overloads()):
            missing.append(each)
    assert missing == []


def test_what_torch_documents_is_listed_or_is_of_no_step() -> None:
    assert documented() - NAMED.keys() - OF_NO_STEP.keys() == set()
    assert NAMED.keys() & OF_NO_STEP.keys() == set()
    assert len(documented()) > 35


def test_modes_of_resizing_that_torch_documents_are_listed() -> None:
    text = inspect.getdoc(torch.use_deterministic_algorithms) or ""
    modes = re.findall(r"- ``(\w+)``", text)
    names = NAMED["torch.nn.functional.interpolate"]
    assert len(modes) == 4
    assert [mode for mode in modes if not any(name.startswith(f"upsample_{mode}") for name in names)] == []


def test_ops_that_add_in_any_order_are_counted_by_name() -> None:
    once = dict.fromkeys(("index_add", "cumsum", "median.dim", "bincount"), 1)
    assert unrepeatable_ops(STEP) == once | {"_flash_attention_backward": 2}


def test_the_gradient_of_indexing_is_repeatable_unless_inductor_compiles_it() -> None:
    assert unrepeatable_ops(STEP, is_compiled=True)["index_put"] == 1


class Applied(nn.Module):
    """A function of a parameter of these sizes."""

    def __init__(self, function: Callable[[Tensor], Tensor], *sizes: int) -> None:
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.randn(*sizes)), function

    def forward(self) -> Tensor:
        return self.function(self.weight).sum()


LAYERS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "convolution convolution_backward": (lambda w: F.conv_transpose1d(w, torch.ones(6, 2, 3)), (1, 6, 8)),
    "replication_pad2d_backward": (lambda w: F.pad(w, (1, 1, 1, 1), "replicate"), (1, 2, 4, 4)),
    "reflection_pad3d_backward": (lambda w: F.pad(w, (1,) * 6, "reflect"), (1, 2, 4, 4, 4)),
    "embedding_dense_backward": (lambda w: F.embedding(INDICES, w), (6, 8)),
    "_embedding_bag_backward": (lambda w: F.embedding_bag(INDICES, w, torch.tensor([0, 2]), mode="max"), (6, 8)),
    "max_pool3d_with_indices_backward": (lambda w: F.max_pool3d(w, 2), (1, 2, 4, 4, 4)),
    "avg_pool3d_backward": (lambda w: F.avg_pool3d(w, 2), (1, 2, 4, 4, 4)),
    "_adaptive_avg_pool2d_backward": (lambda w: F.adaptive_avg_pool2d(w, 3), (1, 2, 4, 4)),
    "_adaptive_avg_pool3d_backward": (lambda w: F.adaptive_avg_pool3d(w, 3), (1, 2, 4, 4, 4)),
    "adaptive_max_pool2d_backward": (lambda w: F.adaptive_max_pool2d(w, 3), (1, 2, 4, 4)),
    "max_unpool2d": (lambda w: F.max_unpool1d(w, torch.tensor([[[0, 2]]]), (2,)), (1, 1, 2)),
    "max_unpool3d": (lambda w: F.max_unpool3d(w, torch.tensor([[[[[0]]]]]), (2, 2, 2)), (1, 1, 1, 1, 1)),
    "upsample_bilinear2d_backward": (lambda w: F.interpolate(w, scale_factor=2, mode="bilinear"), (1, 2, 4, 4)),
    "upsample_linear1d_backward": (lambda w: F.interpolate(w, scale_factor=2, mode="linear"), (1, 2, 4)),
    "_upsample_bicubic2d_aa_backward": (
        lambda w: F.interpolate(w, size=(2, 2), mode="bicubic", antialias=True), (1, 2, 4, 4),
    ),
    "grid_sampler_2d_backward": (
        lambda w: F.grid_sample(torch.ones(1, 1, 4, 4), w, align_corners=False), (1, 2, 2, 2),
    ),
    "nll_loss2d_forward nll_loss2d_backward": (
        lambda w: F.cross_entropy(w, torch.zeros(1, 3, 3, dtype=torch.int64)), (1, 4, 3, 3),
    ),
    "_ctc_loss_backward": (
        lambda w: F.ctc_loss(w, torch.tensor([[1, 2]]), torch.tensor([5]), torch.tensor([2])), (5, 1, 4),
    ),
    "index_put": (lambda w: torch.zeros(6, 8).index_put((INDICES,), w), (4, 8)),
    "index_copy": (lambda w: torch.zeros(6, 8).index_copy(0, INDICES, w), (4, 8)),
    "scatter.src": (lambda w: torch.zeros(6, 8).scatter(0, INDICES.expand(8, 4).t(), w), (4, 8)),
    "scatter_add": (lambda w: w.gather(0, INDICES[:, None]), (6, 8)),
    "scatter_reduce": (lambda w: torch.zeros(6).scatter_reduce(0, INDICES, w, "mean"), (4,)),
    "index_reduce": (lambda w: torch.zeros(6, 8).index_reduce(0, INDICES, w, "mean"), (4, 8)),
    "index_add": (lambda w: w.index_select(0, INDICES), (6, 8)),
    "put": (lambda w: torch.zeros(6).put(INDICES, w), (4,)),
    "median.dim": (lambda w: w.median(0).values, (6, 8)),
    "nanmedian.dim": (lambda w: w.nanmedian(0).values, (6, 8)),
    "cumsum": (lambda w: w.cumsum(0), (6, 8)),
}  # fmt: skip


@pytest.mark.parametrize("names", LAYERS)
def test_a_captured_step_has_these_names_for_them(names: str) -> None:
    function, sizes = LAYERS[names]
    report = memgraph.plan(Applied(function, *sizes), budget="1GB")
    found = unrepeatable_ops(report.choice.captured.trace)
    assert set(names.split()) <= found.keys()
    (line,) = repeatability(replace(report, machine=replace(report.machine, device="cuda:0")))
    assert [name for name in names.split() if name not in line] == []


def test_the_gradient_of_indexing_has_no_line() -> None:
    report = memgraph.plan(Applied(lambda w: w[INDICES], 6, 8), budget="1GB")
    assert any(op.fn == "aten.index_put.default" for op in report.choice.captured.trace.ops)
    assert "the same twice" not in on_gpu(report)


def test_an_assignment_of_one_number_has_no_line() -> None:
    report = memgraph.plan(
        Applied(lambda w: (w * 2).index_put((w.detach() > 0,), torch.tensor(1.0)), 6, 8), budget="1GB"
    )
    assert any(op.fn == "aten.index_put.default" for op in report.choice.captured.trace.ops)
    assert "the same twice" not in on_gpu(report)


@pytest.mark.parametrize(("rows", "said"), [(8, False), (512, True)])
def test_large_gradients_of_indexing_differ_on_a_cpu_where_threads_add_them(rows: int, said: bool) -> None:
    indices = torch.zeros(rows, dtype=torch.int64)
    report = memgraph.plan(Applied(lambda w: w[indices], 8, 64), budget="1GB")
    assert ("raises an error: index_put" in verdict(report)) is said


# --- what the report says


def test_of_other_ops_and_of_small_ones_on_a_cpu_nothing_is_said() -> None:
    assert repeatability(made(STEP, "cpu")) == []
    assert repeatability(made(EXACT)) == []


def test_a_report_of_a_gpu_names_them_and_what_to_do() -> None:
    report = memgraph.plan(nn.Conv2d(3, 4, 3), torch.randn(2, 3, 8, 8), budget="1GB")
    assert "the same twice" not in verdict(report)
    said = (
        "gradients are eager's to the bit where eager gives the same twice; with these ops it need not, unless "
        "torch.use_deterministic_algorithms(True) is set, with which torch takes other kernels or raises an error: "
        "convolution, convolution_backward"
    )
    assert said in on_gpu(report).splitlines()


def test_micro_batches_are_said_to_round_on_each_device() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    report = memgraph.plan(model, torch.randn(4, 8), budget="1GB", microbatches=2)
    line = "gradients round differently from eager's: microbatches= adds up those of 2 parts"
    assert line in verdict(report).splitlines()
    assert line in on_gpu(report).splitlines()


def test_compiled_segments_are_said_to_round_and_nothing_is_said_to_be_eagers_to_the_bit() -> None:
    lowered = parse("""
        forward:
        x = input()  # f32[8] | makes x:32
        s = state()  # u8[64] | makes s:64
        a = memgraph.segment(x)  # f32[8] | makes a:32
        p = memgraph.segment(x)  # f32[8] | makes p:32
        return output a, gradient p
    """)
    report = made(STEP, lowered=predict(lowered, Machine(1 << 20)))
    first, second = repeatability(report)
    assert first == "gradients round differently from eager's: lower= compiles 2 segments"
    assert second.startswith("eager need not give the same twice with these ops, unless")
    assert "index_put" in second
    assert "eager's to the bit" not in verdict(report)
    assert repeatability(made(EXACT, lowered=predict(EXACT, Machine(1 << 20)))) == []  # nothing was worth compiling


def test_slices_blocks_that_round_and_casts_are_named() -> None:
    cut = parse_slice("slice 8 rows in 2 parts: a[0:1<0:1,-]")
    blocks = RowBlocks("w", 2, 4, rounds=True), RowBlocks("v", 2, 4, rounds=False)
    report = made(EXACT, "cpu", slices=(cut,), row_blocks=blocks)
    cast = replace(report, choice=replace(report.choice, plan=(Offload("a", "a", "a", "bf16"),)))
    sliced = "slices= runs 1 chain in parts, slices= cuts 1 weight into blocks"
    assert repeatability(report) == [f"gradients round differently from eager's: {sliced}"]
    assert repeatability(cast) == [
        f"gradients round differently from eager's: {sliced}, wire_dtype= rounds 1 offloaded value"
    ]


def test_states_that_the_host_updates_are_said_to_round() -> None:
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    report = memgraph.plan(model, torch.randn(8, 64), budget="1GB", optimizer=optimizer)
    states = [op.name for op in report.choice.captured.trace.ops if op.fn == "state"]
    choice = replace(report.choice, plan=parse_plan(f"stream {states[0]}: on host"))
    assert repeatability(replace(report, choice=choice)) == [
        "parameters round differently from eager's: host_update= updates 1 state there"
    ]


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros(4, 8).index_add(0, INDICES, self.fc(x))


def test_parts_that_run_as_they_are_are_said_not_to_be_looked_at() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), Part()), torch.randn(4, 8)
    line = "not looked at for ops that need not give the same twice: 1, that run as they are"
    report = memgraph.plan(model, x, budget="1GB", opaque=["1"])
    assert line in on_gpu(report).splitlines()
    assert "runs as it is" in verdict(report)
    compiled = memgraph.compile(model, "1GB", opaque=["1"])
    compiled(x).sum().backward()
    assert line in on_gpu(compiled.plan).splitlines()
    assert line not in verdict(compiled.plan)


def test_ops_of_other_libraries_are_said_not_to_be_looked_at() -> None:
    step = parse("""
        forward:
        x = input()  # f32[8] | makes x:32
        a = torchvision.roi_align.default(x)  # f32[8] | makes a:32
        b = torchvision.roi_align.default(a)  # f32[8] | makes b:32
        return output b
    """)
    said = "not looked at for ops that need not give the same twice: torchvision.roi_align.default, of other libraries"
    assert repeatability(made(step)) == [said]


def test_an_update_by_torchs_own_optimizer_gives_the_same_twice() -> None:
    lines = "forward:\nx = input()  # f32[8] | makes x:32\nupdate:\noptimizer_step = {}(x)\nreturn output x"
    assert repeatability(made(parse(lines.format("AdamW.step")))) == []
    assert "Lion.step, of other libraries" in repeatability(made(parse(lines.format("Lion.step"))))[0]


# --- what else a GPU's report says


def test_nothing_is_compiled_unless_it_is_asked_for() -> None:
    for function in (memgraph.compile, memgraph.plan, memgraph.sweep):
        assert inspect.signature(function).parameters["lower"].default is None


def test_a_report_of_a_gpu_says_what_torchs_allocator_would_hold_until_it_was_measured() -> None:
    report = memgraph.plan(nn.Linear(64, 64), torch.randn(32, 64), budget="1GB")
    assert "by simulation" not in str(report)
    there = replace(report, machine=replace(report.machine, device="cuda:0"))
    found = there.allocator()
    sizes = f"give out {mb(found.given)} and hold {mb(found.reserved)}, by simulation"
    assert sizes in " ".join(str(there).split())
    assert "by simulation" not in str(replace(there, held=1 << 20, blocks=1 << 19))
