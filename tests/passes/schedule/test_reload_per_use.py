"""Offloaded state is reloaded in the order of the ops, before them; gradients are offloaded once made."""

from __future__ import annotations

from expecttest import assert_expected_inline

from passes import Link, Machine, Streaming, apply, check
from passes.analysis.reuse_gaps import ReuseGaps
from passes.schedule.schedule import Placement, schedule
from tests.support.interpreter import run
from tests.support.layered_traces import lines, step

STEP = step("u", "v", "w")
LINKED = Machine(0, link=Link(out=10.0, back=10.0), streaming=Streaming(enabled=True))


def streamed(fate: Placement) -> str:
    """The lines of the step, with all parameters and gradients at home in the far tier."""
    plan = schedule(ReuseGaps(STEP), dict.fromkeys(("u", "v", "w", "du", "dv", "dw"), fate), LINKED)
    applied = apply(STEP, plan)
    check(applied)
    assert run(applied).computed == run(STEP).computed
    return lines(applied)


def test_parameters_are_prefetched_and_in_backward_in_reverse() -> None:
    assert_expected_inline(
        streamed(Placement.OFFLOAD),
        """\
u__in_1 = memgraph.reload.default(u)
u__back_1 = memgraph.wait.default(u__in_1)
v__in_1 = memgraph.reload.default(v)
a = f(x, u__back_1)
v__back_1 = memgraph.wait.default(v__in_1)
w__in_1 = memgraph.reload.default(w)
b = f(a, v__back_1)
w__back_1 = memgraph.wait.default(w__in_1)
c = f(b, w__back_1)
w__in_2 = memgraph.reload.default(w)
dw = g(d, b)
dw__out = memgraph.offload.default(dw)
w__back_2 = memgraph.wait.default(w__in_2)
p = g(d, w__back_2)
dw__free = memgraph.free.default(dw__out, dw)
v__in_2 = memgraph.reload.default(v)
dv = g(p, a)
dv__out = memgraph.offload.default(dv)
v__back_2 = memgraph.wait.default(v__in_2)
q = g(p, v__back_2)
dv__free = memgraph.free.default(dv__out, dv)
u__in_2 = memgraph.reload.default(u)
du = g(q, x)
du__out = memgraph.offload.default(du)
u__back_2 = memgraph.wait.default(u__in_2)
r = g(q, u__back_2)
du__free = memgraph.free.default(du__out, du)
""",
    )


def test_a_value_that_is_reloaded_per_use_is_on_the_device_for_its_use_alone() -> None:
    assert_expected_inline(
        streamed(Placement.OFFLOAD_BLOCKING),
        """\
u__in_1 = memgraph.reload.default(u)
u__back_1 = memgraph.wait.default(u__in_1)
a = f(x, u__back_1)
v__in_1 = memgraph.reload.default(v)
v__back_1 = memgraph.wait.default(v__in_1)
b = f(a, v__back_1)
w__in_1 = memgraph.reload.default(w)
w__back_1 = memgraph.wait.default(w__in_1)
c = f(b, w__back_1)
dw = g(d, b)
dw__out = memgraph.offload.default(dw)
dw__free = memgraph.free.default(dw__out, dw)
w__in_2 = memgraph.reload.default(w)
w__back_2 = memgraph.wait.default(w__in_2)
p = g(d, w__back_2)
dv = g(p, a)
dv__out = memgraph.offload.default(dv)
dv__free = memgraph.free.default(dv__out, dv)
v__in_2 = memgraph.reload.default(v)
v__back_2 = memgraph.wait.default(v__in_2)
q = g(p, v__back_2)
du = g(q, x)
du__out = memgraph.offload.default(du)
du__free = memgraph.free.default(du__out, du)
u__in_2 = memgraph.reload.default(u)
u__back_2 = memgraph.wait.default(u__in_2)
r = g(q, u__back_2)
""",
    )
