"""Complete reports of steps that fit, exceed the budget, offload, stream, are compiled or sharded."""

from __future__ import annotations

from typing import Any

from expecttest import assert_expected_inline

from memgraph.report.report import Report
from passes import Link, Machine, Network, PlanResult, Trace, apply, parse, parse_plan, predict

TRAIN = parse("""
    forward:
    x = input()  # f32[800, 1000] | makes x:3200000 | at input_0
    w = parameter()  # f32[1000, 1000] | makes w:4000000 | at layers.0.weight
    v = parameter()  # f32[1000, 1000] | makes v:4000000 | at layers.1.weight
    s = state()  # u8[8000000] | makes s:8000000 | at AdamW
    d = tangent()  # f32[] | makes d:4
    a = aten.mm.default(x, w)  # f32[800, 1000] | makes a:3200000 | 900.0 us | at layers.0 net.py:7
    h = aten.gelu.default(a)  # f32[800, 1000] | makes h:3200000 | 100.0 us | at layers.0 net.py:7
    b = aten.mm.default(h, v)  # f32[800, 1000] | makes b:3200000 | 900.0 us | at layers.1 net.py:8
    loss = aten.sum.default(b)  # f32[] | makes loss:4 | 10.0 us | at net.py:9
    backward:
    g = aten.expand.default(d)  # f32[800, 1000] | makes g:3200000 | 10.0 us | at net.py:9
    dv = aten.mm.default(h, g)  # f32[1000, 1000] | makes dv:4000000 | 900.0 us | at layers.1
    e = aten.mm.default(g, v)  # f32[800, 1000] | makes e:3200000 | 900.0 us | at layers.1
    da = aten.gelu_backward.default(e, a)  # f32[800, 1000] | makes da:3200000 | 100.0 us | at layers.0
    dw = aten.mm.default(x, da)  # f32[1000, 1000] | makes dw:4000000 | workspace 64 | 900.0 us | at layers.0
    return output loss, gradient dw, gradient dv
""")
DISK = Machine(33_000_000, tier="disk", link=Link(out=10_000.0, back=10_000.0))
SHARDED = parse("""
    forward:
    w = parameter()  # f32[1000, 1000] | makes w:4000000 | at weight
    x = input()  # f32[8, 1000] | makes x:32000 | at input_0
    d = tangent()  # f32[] | makes d:4
    y = aten.mm.default(x, w)  # f32[8, 1000] | makes y:32000 | 500.0 us | at net.py:3
    backward:
    g = aten.mm.default(x, d)  # f32[1000, 1000] | makes g:4000000 | 500.0 us | at net.py:3
    part = memgraph.reduce_scatter.default(g)  # f32[500000] | makes part:2000000
    shard = memgraph.reduced.default(part, g)  # f32[500000] | holds part
    return output y, shard shard
""")


def report(machine: Machine, decisions: str = "", trace: Trace = TRAIN, **facts: Any) -> str:
    """Print the report of a plan that is given as text."""
    plan = parse_plan(decisions)
    captured, forecast = predict(trace, machine), predict(apply(trace, plan), machine)
    choice = PlanResult(plan, captured, forecast, bound_us=50.0 if plan else 0.0, any_us=0.0)
    return str(Report(machine, choice, **facts)) + "\n"


def test_a_step_that_fits() -> None:
    assert_expected_inline(
        report(DISK, measured=32_800_000, measured_us=4800.0),
        """\
fits: forecast 32800008 B, measured 32800000 B, budget 33000000 B
time: forecast 4.7 ms, +0.0%; as it is, the step takes 4.7 ms and needs 32.8 MB
took 4.8 ms

bytes
kind        at the peak  at its own peak
parameter        8.0 MB           8.0 MB
state            8.0 MB           8.0 MB
input            3.2 MB           3.2 MB
gradient         4.0 MB           8.0 MB
tangent             4 B              4 B
output              4 B              4 B
activation       6.4 MB           6.4 MB
temporary        3.2 MB           6.4 MB
workspace           0 B             64 B
all             32.8 MB

at the peak, aten.mm.default layers.1
kind         bytes  what                 type             where
state       8.0 MB  state                u8[8000000]      AdamW
parameter   8.0 MB  2 x parameter        f32[1000, 1000]  layers.*.weight
gradient    4.0 MB  aten.mm.default      f32[1000, 1000]  layers.1
input       3.2 MB  input                f32[800, 1000]   input_0
activation  3.2 MB  aten.mm.default      f32[800, 1000]   layers.0 net.py:7
activation  3.2 MB  aten.gelu.default    f32[800, 1000]   layers.0 net.py:7
temporary   3.2 MB  aten.expand.default  f32[800, 1000]   net.py:9
tangent        4 B  tangent              f32[]
output         4 B  aten.sum.default     f32[]            net.py:9

decided: nothing; the step fits as it is
""",
    )


def test_a_step_that_was_over_its_budget() -> None:
    beyond = "the loop held the outputs of 2 steps"
    assert_expected_inline(
        report(DISK, measured=34_000_000, beyond=beyond, counted=False),
        """\
over the budget: forecast 32.8 MB, measured 34.0 MB, budget 33.0 MB; the loop held the outputs of 2 steps
time: forecast 4.7 ms, +0.0%; as it is, the step takes 4.7 ms and needs 32.8 MB
no optimizer was given: its states and its update are not counted; give optimizer=

bytes
kind        at the peak  at its own peak
parameter        8.0 MB           8.0 MB
state            8.0 MB           8.0 MB
input            3.2 MB           3.2 MB
gradient         4.0 MB           8.0 MB
tangent             4 B              4 B
output              4 B              4 B
activation       6.4 MB           6.4 MB
temporary        3.2 MB           6.4 MB
workspace           0 B             64 B
all             32.8 MB

at the peak, aten.mm.default layers.1
kind         bytes  what                 type             where
state       8.0 MB  state                u8[8000000]      AdamW
parameter   8.0 MB  2 x parameter        f32[1000, 1000]  layers.*.weight
gradient    4.0 MB  aten.mm.default      f32[1000, 1000]  layers.1
input       3.2 MB  input                f32[800, 1000]   input_0
activation  3.2 MB  aten.mm.default      f32[800, 1000]   layers.0 net.py:7
activation  3.2 MB  aten.gelu.default    f32[800, 1000]   layers.0 net.py:7
temporary   3.2 MB  aten.expand.default  f32[800, 1000]   net.py:9
tangent        4 B  tangent              f32[]
output         4 B  aten.sum.default     f32[]            net.py:9

decided: nothing; the step fits as it is
""",
    )


def test_a_step_that_recomputes_and_offloads() -> None:
    plan = """
        recompute h: before dv
        offload a: out h, free b
        reload a: back e, use da
    """
    facts: dict[str, Any] = {
        "measured_us": 5200.0,
        "repriced_us": 5100.0,
        "recent_us": 6000.0,
        "expected_us": 5100.0,
        "slower": 0.15,
    }
    assert_expected_inline(
        report(DISK, plan, measured=29_000_000, **facts),
        """\
fits: forecast 32.8 MB, measured 29.0 MB, budget 33.0 MB
time: forecast 4.8 ms, +2.1%; as it is, the step takes 4.7 ms and needs 32.8 MB
took 5.2 ms; forecast with the times of its own ops 5.1 ms
the latest steps took 6.0 ms at the median, +18% on the forecast of 5.1 ms: a reference op takes 15% longer than when
ops were priced
proven: no plan in which each value is recomputed and reloaded at most once takes less than 4.8 ms; this one is 1.0%
above

bytes
kind        at the peak  at its own peak
parameter        8.0 MB           8.0 MB
state            8.0 MB           8.0 MB
input            3.2 MB           3.2 MB
gradient         4.0 MB           8.0 MB
tangent             4 B              4 B
output              4 B              4 B
activation       3.2 MB           3.2 MB
temporary        6.4 MB           6.4 MB
workspace           0 B             64 B
all             32.8 MB

at the peak, aten.mm.default layers.1
kind         bytes  what                     type             where
state       8.0 MB  state                    u8[8000000]      AdamW
parameter   8.0 MB  2 x parameter            f32[1000, 1000]  layers.*.weight
gradient    4.0 MB  aten.mm.default          f32[1000, 1000]  layers.1
input       3.2 MB  input                    f32[800, 1000]   input_0
temporary   3.2 MB  aten.expand.default      f32[800, 1000]   net.py:9
activation  3.2 MB  memgraph.reload.default  f32[800, 1000]   layers.0 net.py:7
temporary   3.2 MB  aten.mm.default          f32[800, 1000]   layers.1
tangent        4 B  tangent                  f32[]
output         4 B  aten.sum.default         f32[]            net.py:9

decided
what       op                 where               bytes    time  why
recompute  aten.gelu.default  layers.0 net.py:7  3.2 MB  0.1 ms  offloading would take 0.6 ms
offload    aten.mm.default    layers.0 net.py:7  3.2 MB  0.0 ms  hides behind compute
""",
    )


def test_a_step_whose_parameters_are_streamed() -> None:
    plan = """
        stream s
        stream w
        reload w: back d, use a
    """
    assert_expected_inline(
        report(DISK, plan, adding=40_000_000),
        """\
fits: forecast 20.8 MB, measured not yet, budget 33.0 MB
no plan within the budget was found for a call that adds to gradients; one needs 40000000 B
time: forecast 5.1 ms, +8.5%; as it is, the step takes 4.7 ms and needs 32.8 MB
proven: no plan in which each value is recomputed and reloaded at most once takes less than 4.8 ms; this one is 7.3%
above

bytes
kind        at the peak  at its own peak
parameter        4.0 MB           8.0 MB
input            3.2 MB           3.2 MB
gradient         4.0 MB           8.0 MB
tangent             4 B              4 B
output              4 B              4 B
activation       6.4 MB           6.4 MB
temporary        3.2 MB           6.4 MB
workspace           0 B             64 B
all             20.8 MB

at the peak, aten.mm.default layers.1
kind         bytes  what                 type             where
parameter   4.0 MB  2 x parameter        f32[1000, 1000]  layers.*.weight
gradient    4.0 MB  aten.mm.default      f32[1000, 1000]  layers.1
input       3.2 MB  input                f32[800, 1000]   input_0
activation  3.2 MB  aten.mm.default      f32[800, 1000]   layers.0 net.py:7
activation  3.2 MB  aten.gelu.default    f32[800, 1000]   layers.0 net.py:7
temporary   3.2 MB  aten.expand.default  f32[800, 1000]   net.py:9
tangent        4 B  tangent              f32[]
output         4 B  aten.sum.default     f32[]            net.py:9
state          0 B  state                u8[8000000]      AdamW

decided
what    op         where             bytes    time  why
stream  state      AdamW            8.0 MB  0.0 ms  offloaded to disk
stream  parameter  layers.0.weight  4.0 MB  0.4 ms  offloaded to disk

what would help, by forecast
  spill_dir= on a disk twice as fast: 4.9 ms, +4.2%
""",
    )


def test_the_bound_of_a_step_with_regions_is_one_of_ops() -> None:
    """In a region they take less than what the bound was proven with."""
    text = str(TRAIN).replace("h = aten.gelu.default(a)", "h_region = memgraph.segment(a)")
    text = text.replace("100.0 us | at layers.0 net.py:7", "1.0 us").replace("(h, ", "(h_region, ")
    facts: dict[str, Any] = {"lowered": predict(parse(text), DISK), "apart_us": 4820.0}
    printed = " ".join(report(DISK, "recompute h: before dv", **facts).split())
    assert "compiled: 1 segment: 4.6 ms with it, 4.8 ms with their ops one by one 1 of them is all ops" in printed
    assert "proven, before all ops between two memory ops are compiled as one: no plan in which each value" in printed


def test_a_bound_that_the_step_has_disproved_is_not_stated() -> None:
    wanted = "proven: no bound, since the step took less than the prices of its ops allow"
    offload = "recompute h: before dv"
    assert wanted in " ".join(report(DISK, offload, measured_us=1000.0).split())
    assert "takes less than" in " ".join(report(DISK, offload, measured_us=9000.0).split())
    assert wanted in " ".join(report(DISK, offload, recent_us=1000.0, expected_us=1000.0).split())


def test_a_step_that_is_compiled_in_part() -> None:
    lowered = parse(str(TRAIN).replace("aten.gelu.default(a)", "memgraph.segment(a)"))
    facts: dict[str, Any] = {"lowered": predict(lowered, DISK), "apart_us": 4720.0, "uncompiled": 1}
    assert_expected_inline(
        report(DISK, **facts),
        """\
fits: forecast 32.8 MB, measured not yet, budget 33.0 MB
time: forecast 4.7 ms, +0.0%; as it is, the step takes 4.7 ms and needs 32.8 MB
gradients round differently from eager's: lower= compiles 1 segment
compiled: 1 segment: 4.7 ms with it, 4.7 ms with their ops one by one; 1 can't be

bytes
kind        at the peak  at its own peak
parameter        8.0 MB           8.0 MB
state            8.0 MB           8.0 MB
input            3.2 MB           3.2 MB
gradient         4.0 MB           8.0 MB
tangent             4 B              4 B
output              4 B              4 B
activation       6.4 MB           6.4 MB
temporary        3.2 MB           6.4 MB
workspace           0 B             64 B
all             32.8 MB

at the peak, aten.mm.default layers.1
kind         bytes  what                 type             where
state       8.0 MB  state                u8[8000000]      AdamW
parameter   8.0 MB  2 x parameter        f32[1000, 1000]  layers.*.weight
gradient    4.0 MB  aten.mm.default      f32[1000, 1000]  layers.1
input       3.2 MB  input                f32[800, 1000]   input_0
activation  3.2 MB  aten.mm.default      f32[800, 1000]   layers.0 net.py:7
activation  3.2 MB  memgraph.segment     f32[800, 1000]   layers.0 net.py:7
temporary   3.2 MB  aten.expand.default  f32[800, 1000]   net.py:9
tangent        4 B  tangent              f32[]
output         4 B  aten.sum.default     f32[]            net.py:9

decided: nothing; the step fits as it is
""",
    )


def test_a_step_whose_gradients_are_sharded() -> None:
    machine = Machine(30_000_000, network=Network(rate=1000.0, latency_us=20.0))
    assert_expected_inline(
        report(machine, trace=SHARDED),
        """\
fits: forecast 10.1 MB, measured not yet, budget 30.0 MB
time: forecast 5.0 ms, +0.0%; as it is, the step takes 5.0 ms and needs 10.1 MB
network: 1 exchange of 4.0 MB, 4.0 ms; compute hides 0.0 ms of it

bytes
kind       at the peak  at its own peak
parameter       4.0 MB           4.0 MB
input          32.0 kB          32.0 kB
gradient        2.0 MB           2.0 MB
tangent            4 B              4 B
output         32.0 kB          32.0 kB
temporary       4.0 MB           4.0 MB
all            10.1 MB

at the peak, memgraph.reduce_scatter.default
kind         bytes  what                             type             where
parameter   4.0 MB  parameter                        f32[1000, 1000]  weight
temporary   4.0 MB  aten.mm.default                  f32[1000, 1000]  net.py:3
gradient    2.0 MB  memgraph.reduce_scatter.default  f32[500000]
input      32.0 kB  input                            f32[8, 1000]     input_0
output     32.0 kB  aten.mm.default                  f32[8, 1000]     net.py:3
tangent        4 B  tangent                          f32[]

decided: nothing; the step fits as it is
""",
    )
