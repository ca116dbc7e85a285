"""On a slow link, prefetched values are kept; values that are reloaded at each use are offloaded at any speed."""

from __future__ import annotations

from passes import Link, Machine, Reload, parse
from passes.analysis.reuse_gaps import ReuseGaps
from passes.schedule.schedule import Placement, schedule

STEP = parse("""
    forward:
    w = parameter()  # f32[4, 4] | makes w:64
    x = input()  # f32[8, 4] | makes x:128
    d = tangent()  # f32[8, 4] | makes d:128
    t = t(w)  # f32[4, 4] | holds w
    a = mm(x, t)  # f32[8, 4] | makes a:128 | 10.0 us
    o = relu(a)  # f32[8, 4] | makes o:128 | 10.0 us
    backward:
    e = relu_backward(d, o)  # f32[8, 4] | makes e:128 | 10.0 us
    g = mm(e, t)  # f32[8, 4] | makes g:128 | 10.0 us
    return output o, gradient g
""")
SLOW = Machine(0, link=Link(out=0.1, back=0.1))  # 640 us for w, which is away for 30


def fetches(fate: Placement, machine: Machine) -> list[tuple[str, str]]:
    plan = schedule(ReuseGaps(STEP), {"w": fate}, machine)
    return [(decision.back, decision.use) for decision in plan if isinstance(decision, Reload)]


def test_a_slow_link_prefetches_once() -> None:
    assert fetches(Placement.OFFLOAD, SLOW) == [("t", "t")]


def test_a_fast_link_prefetches_for_each_use() -> None:
    assert fetches(Placement.OFFLOAD, Machine(0, link=Link(out=6.4, back=6.4))) == [("t", "t"), ("e", "g")]


def test_a_value_that_is_reloaded_per_use_is_reloaded_for_each_use() -> None:
    assert fetches(Placement.OFFLOAD_BLOCKING, SLOW) == [("t", "t"), ("g", "g")]
