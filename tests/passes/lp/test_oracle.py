"""Two oracles give the optimum of small steps, agree where they should, and no plan is better."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from expecttest import assert_expected_inline
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from passes import Machine, Plan, Recompute, Trace, apply, check, parse, predict
from passes.analysis.reuse_gaps import ReuseGaps
from passes.search.greedy import greedy_plan
from tests.oracle.checkmate import Optimum, checkmate, sweeps_of
from tests.oracle.exhaustive import best_fates, best_keep_set, cheapest, cheapest_of_all
from tests.oracle.network import layers
from tests.oracle.replay import replay
from tests.passes.search.test_greedy import FAST, NO_LINK, SLOW, STEP
from tests.support.strategies import decoded, machines, recomputes, traces

SECONDS = 500.0  # none takes a minute

# n makes two storages; y weighs much and r little, and e leaves no room for y.
SEVERAL = parse("""
    forward:
    x = input()  # u8[10] | makes x:10
    d = tangent()  # u8[5] | makes d:5
    n = norm(x)  # u8[1000], u8[20] | makes n.0:1000, n.1:20 | 7.0 us | workspace 50
    y = getitem(n)  # u8[1000] | holds n.0
    r = getitem(n)  # u8[20] | holds n.1
    z = mm(y, r)  # u8[100] | makes z:100 | 90.0 us
    o = sum(z)  # u8[4] | makes o:4 | 1.0 us
    backward:
    e = big(d)  # u8[900] | makes e:900 | 1.0 us | workspace 100
    f = small(e, r)  # u8[60] | makes f:60 | 1.0 us
    g = mm_backward(f, y, r)  # u8[10] | makes g:10 | 90.0 us
    return output o, gradient g
""")

# s and t are small and made of what is large: p and q can't be there at the same time.
ORDER = parse("""
    forward:
    x = input()  # u8[10] | makes x:10
    d = tangent()  # u8[5] | makes d:5
    p = conv(x)  # u8[1000] | makes p:1000 | 3.0 us
    q = conv(x)  # u8[1000] | makes q:1000 | 3.0 us
    s = sum(p)  # u8[100] | makes s:100 | 1.0 us
    t = sum(q)  # u8[100] | makes t:100 | 1.0 us
    o = add(s, t)  # u8[1] | makes o:1 | 1.0 us
    backward:
    e = big(d)  # u8[1500] | makes e:1500 | 1.0 us | workspace 1200
    g = mul(e, s, t)  # u8[10] | makes g:10 | 1.0 us
    return output o, gradient g
""")

# The peak is while e runs; the noise of f takes 16 bytes for the generator's state from its first run to its second.
NOISE = parse("""
    forward:
    x = input()  # u8[10] | makes x:10
    d = tangent()  # u8[5] | makes d:5
    f = dropout(x)  # u8[100] | makes f:100 | 2.0 us | draws 16
    o = sum(f)  # u8[1] | makes o:1 | 1.0 us
    backward:
    e = big(d)  # u8[500] | makes e:500 | 1.0 us | workspace 300
    g = mul(e, f)  # u8[10] | makes g:10 | 1.0 us
    return output o, gradient g
""")


def peak(trace: Trace, plan: Plan = ()) -> int:
    return predict(apply(trace, plan), NO_LINK).peak


def solved(trace: Trace, budget: int, sweeps: int = 1) -> Optimum:
    """Return Checkmate's optimum, after a check that its recomputation has that peak and time."""
    found = checkmate(trace, budget, SECONDS, sweeps)
    assert (found.proven and abs(found.us - found.bound_us) < 1e-6) or found.us == found.bound_us == math.inf
    if found.us < math.inf:
        applied = apply(trace, replay(trace, found.reruns))
        check(applied)
        forecast = predict(applied, NO_LINK)
        assert forecast.peak <= budget
        assert forecast.us - predict(trace, NO_LINK).us == pytest.approx(found.us, abs=1e-6)
    return found


def table(trace: Trace, budgets: list[int], sweeps: int = 1) -> str:
    """Return the result of each oracle for each budget."""
    lines = []
    for budget in budgets:
        keeps, fates = cheapest(trace, budget), cheapest_of_all(trace, replace(NO_LINK, budget=budget))
        lines.append(f"{budget}: keep-sets {keeps}, fates {fates}, checkmate {solved(trace, budget, sweeps).us:g}")
    return "\n".join(lines) + "\n"


def test_the_optimum_of_a_chain() -> None:
    """Checkmate is better where it keeps a recomputed value over one use and not the next: no placement does."""
    assert_expected_inline(
        table(STEP, [7108, 7107, 6108, 6107, 5108, 5107, 4608, 4607, 4108, 4107]),
        """\
7108: keep-sets 0.0, fates 0.0, checkmate 0
7107: keep-sets 5.0, fates 5.0, checkmate 5
6108: keep-sets 5.0, fates 5.0, checkmate 5
6107: keep-sets 505.0, fates 505.0, checkmate 505
5108: keep-sets 505.0, fates 505.0, checkmate 505
5107: keep-sets None, fates 1010.0, checkmate 1010
4608: keep-sets None, fates 1010.0, checkmate 1010
4607: keep-sets None, fates 2010.0, checkmate 1510
4108: keep-sets None, fates 2010.0, checkmate 1510
4107: keep-sets None, fates None, checkmate inf
""",
    )


def test_an_op_with_several_results_makes_all_of_them_again() -> None:
    """As n runs again before g, x, o, d, f and both results are there, and its workspace: 1149 bytes.  Fates that keep r
    keep it until g has read it, 20 bytes more; Checkmate takes the new one there."""
    assert_expected_inline(
        table(SEVERAL, [2039, 2038, 1169, 1168, 1149, 1148]),
        """\
2039: keep-sets 0.0, fates 0.0, checkmate 0
2038: keep-sets 7.0, fates 7.0, checkmate 7
1169: keep-sets 7.0, fates 7.0, checkmate 7
1168: keep-sets None, fates None, checkmate 7
1149: keep-sets None, fates None, checkmate 7
1148: keep-sets None, fates None, checkmate inf
""",
    )


def test_an_order_that_goes_back_takes_a_second_sweep() -> None:
    """In one sweep q runs before s, while p is there: what cannot be planned so can be made in the order p, s, q, t."""
    assert_expected_inline(
        table(ORDER, [2916, 2915, 2816, 2815, 2716, 2715], sweeps=2),
        """\
2916: keep-sets 0.0, fates 0.0, checkmate 0
2915: keep-sets 4.0, fates 4.0, checkmate 4
2816: keep-sets 4.0, fates 4.0, checkmate 4
2815: keep-sets 8.0, fates 8.0, checkmate 8
2716: keep-sets 8.0, fates 8.0, checkmate 8
2715: keep-sets None, fates None, checkmate inf
""",
    )
    assert solved(ORDER, 2816).us == 4.0
    assert solved(ORDER, 2815).us == math.inf


def test_what_drew_random_numbers_leaves_the_state_behind() -> None:
    assert_expected_inline(
        table(NOISE, [916, 915, 832, 831]),
        """\
916: keep-sets 0.0, fates 0.0, checkmate 0
915: keep-sets 2.0, fates 2.0, checkmate 2
832: keep-sets 2.0, fates 2.0, checkmate 2
831: keep-sets None, fates None, checkmate inf
""",
    )


def test_what_may_run_once_stays() -> None:
    once = parse(str(STEP).replace("0 us\n", "0 us | once\n"))
    assert_expected_inline(
        table(once, [7108, 7107]),
        """\
7108: keep-sets 0.0, fates 0.0, checkmate 0
7107: keep-sets None, fates None, checkmate inf
""",
    )


def test_inputs_count_throughout_tangents_in_backward_and_outputs_to_the_end() -> None:
    step = parse("""
        forward:
        x = input()  # u8[100] | makes x:100
        d = tangent()  # u8[1000] | makes d:1000
        a = relu(x)  # u8[50] | makes a:50 | 1.0 us | workspace 960
        o = relu(a)  # u8[20] | makes o:20 | 1.0 us
        backward:
        v = view(d)  # u8[1000] | holds d
        g = neg(v)  # u8[3] | makes g:3 | 1.0 us
        h = neg(g)  # u8[3] | makes h:3 | 1.0 us | workspace 10
        return output o, gradient g, gradient h
    """)
    assert predict(step, NO_LINK).total.tolist() == [100, 100, 1110, 170, 1120, 1123, 1136]
    assert_expected_inline(
        table(step, [1136, 1135]),
        """\
1136: keep-sets 0.0, fates 0.0, checkmate 0
1135: keep-sets None, fates None, checkmate inf
""",
    )


def test_tangents_come_with_the_first_op_of_backward_even_if_that_takes_nothing() -> None:
    step = parse("""
        forward:
        d = tangent()  # u8[1000] | makes d:1000
        a = relu()  # u8[50] | makes a:50 | 1.0 us
        backward:
        v = view(d)  # u8[1000] | holds d
        return output a
    """)
    assert_expected_inline(
        table(step, [1050, 1049]),
        """\
1050: keep-sets 0.0, fates 0.0, checkmate 0
1049: keep-sets None, fates None, checkmate inf
""",
    )


def test_what_a_view_in_backward_holds_stays() -> None:
    """a is not recomputed for g, which reads v, a view of forward's a."""
    step = parse("""
        forward:
        x = input()  # u8[10] | makes x:10
        d = tangent()  # u8[5] | makes d:5
        a = relu(x)  # u8[100] | makes a:100 | 2.0 us
        o = sum(a)  # u8[1] | makes o:1 | 1.0 us
        backward:
        v = view(a)  # u8[100] | holds a
        e = big(d)  # u8[500] | makes e:500 | 1.0 us | workspace 300
        g = mul(e, v)  # u8[10] | makes g:10 | 1.0 us
        return output o, gradient g
    """)
    assert_expected_inline(
        table(step, [916, 915]),
        """\
916: keep-sets 0.0, fates 0.0, checkmate 0
915: keep-sets None, fates None, checkmate inf
""",
    )


def test_a_step_without_backward_or_without_ops_has_nothing_to_decide() -> None:
    forward = parse("""
        x = input()  # u8[100] | makes x:100
        a = relu(x)  # u8[50] | makes a:50 | 1.0 us
        return output a
    """)
    assert_expected_inline(
        table(forward, [150, 149]),
        """\
150: keep-sets 0.0, fates 0.0, checkmate 0
149: keep-sets None, fates None, checkmate inf
""",
    )
    assert_expected_inline(
        table(parse("return"), [0]),
        """\
0: keep-sets 0.0, fates 0.0, checkmate 0
""",
    )


@pytest.mark.long
def test_the_optimum_with_a_tier() -> None:
    lines = []
    for budget in (6158, 4658, 4157):
        found = [cheapest_of_all(STEP, replace(machine, budget=budget)) for machine in (NO_LINK, SLOW, FAST)]
        lines.append(f"{budget}: without {found[0]}, slow {found[1]}, fast {found[2]}")
    assert_expected_inline(
        "\n".join(lines) + "\n",
        """\
6158: without 5.0, slow 5.0, fast 0.0
4658: without 1010.0, slow 1010.0, fast 2.0
4157: without 2010.0, slow 2010.0, fast 2010.0
""",
    )


@st.composite
def pressed(draw: st.DrawFn, max_forward: int, most: int) -> tuple[Trace, int]:
    """A step with at most `most` movable storages, and a budget between what it takes and about the least possible."""
    trace = draw(traces(max_forward=max_forward))
    assume(len(ReuseGaps(trace).producer) <= most)
    top, least = peak(trace), peak(trace, greedy_plan(trace, NO_LINK))
    return trace, top - (top - least) * draw(st.integers(0, 11)) // 10


def assert_not_better_than_checkmate(trace: Trace, budget: int, best: tuple[float, Plan] | None) -> None:
    found = solved(trace, budget, sweeps_of(trace, best[1]) if best else 1)
    assert best is None or found.us <= best[0] + 1e-6


@settings(max_examples=60)
@given(pressed(max_forward=4, most=12))
def test_no_keep_set_beats_checkmate(case: tuple[Trace, int]) -> None:
    trace, budget = case
    assert_not_better_than_checkmate(trace, budget, best_keep_set(trace, budget))


@settings(max_examples=20)
@given(pressed(max_forward=3, most=5))
def test_no_placements_without_a_tier_beat_checkmate(case: tuple[Trace, int]) -> None:
    trace, budget = case
    best = best_fates(trace, replace(NO_LINK, budget=budget))
    keeps = cheapest(trace, budget)
    assert keeps is None or (best is not None and best[0] <= keeps)
    assert_not_better_than_checkmate(trace, budget, best)


@settings(max_examples=40)
@given(st.data())
def test_no_recomputes_beat_checkmate(data: st.DataObject) -> None:
    """Wherever in backward they stand, and whatever they make again."""
    trace = data.draw(traces(max_forward=6))
    boundary, index = trace.boundary, ReuseGaps(trace).trace.index
    drawn = data.draw(recomputes(trace))
    plan = tuple(d for d in drawn if isinstance(d, Recompute) and index[d.value] < boundary <= index[d.before])
    forecast = predict(apply(trace, plan), NO_LINK)
    assert_not_better_than_checkmate(trace, forecast.peak, (forecast.us - predict(trace, NO_LINK).us, plan))


@settings(max_examples=40)
@given(pressed(max_forward=3, most=4), machines())
def test_greedy_does_not_beat_all_placements(case: tuple[Trace, int], machine: Machine) -> None:
    trace, budget = case
    machine = replace(machine, budget=budget)
    forecast = predict(apply(trace, greedy_plan(trace, machine)), machine)
    if forecast.peak <= budget:
        least = cheapest_of_all(trace, machine)
        assert least is not None and least <= forecast.us - predict(trace, machine).us + 1e-6


def test_a_second_sweep_costs_nothing() -> None:
    """More freedom never makes the optimum worse."""
    for trace in (STEP, SEVERAL, ORDER, NOISE):
        least, most = peak(trace, greedy_plan(trace, NO_LINK)), peak(trace)
        for budget in (most, (least + most) // 2, least):
            assert solved(trace, budget, 2).us <= solved(trace, budget).us


def test_what_is_not_finished_in_time_is_not_proven() -> None:
    found = checkmate(STEP, 4608, seconds=0.0)
    assert not found.proven and found.bound_us <= 1010.0 <= found.us


@pytest.mark.long
@pytest.mark.parametrize("seeds", [range(300), pytest.param(range(300, 3000), marks=pytest.mark.slow)])
def test_no_keep_set_beats_checkmate_all_the_way_down(seeds: range) -> None:
    """From what a step takes to the least, at the very budgets at which something has to give."""
    for seed in seeds:
        trace = step_of(random.Random(seed))
        budget = peak(trace) - 1
        while best := best_keep_set(trace, budget):
            assert_not_better_than_checkmate(trace, budget, best)
            tight = peak(trace, best[1])
            assert_not_better_than_checkmate(trace, tight, best)
            budget = tight - 1
        solved(trace, budget)


def step_of(dice: random.Random, most: int = 8) -> Trace:
    """A step with some movable storages, and with at most `most`."""
    while True:
        codes = [(dice.randbytes(10), dice.randbytes(10)) for _ in range(dice.randint(2, 6))]
        trace = decoded(codes, late=dice.random() < 0.5, updated=dice.random() < 0.3)
        if ReuseGaps(trace).uses and len(ReuseGaps(trace).producer) <= most:
            return trace


def test_two_layers_of_a_network() -> None:
    assert_expected_inline(
        network(2, [0.9, 0.7, 0.5]),
        """\
100590: checkmate 4, greedy 9
92347: checkmate 9, greedy 9
84104: checkmate 13, greedy 17
""",
    )


@pytest.mark.slow
def test_ten_layers_of_a_network() -> None:
    """A hundred ops that make bytes; takes a minute."""
    assert_expected_inline(
        network(10, [0.7, 0.5]),
        """\
332270: checkmate 58, greedy 63
264840: checkmate 101, greedy 105
""",
    )


def network(count: int, parts: list[float]) -> str:
    """Checkmate's optimum and greedy's plan between the most and the least that greedy finds."""
    trace = layers(count)
    check(trace)
    top, least, lines = peak(trace), peak(trace, greedy_plan(trace, NO_LINK)), []
    for part in parts:
        budget = int(least + (top - least) * part)
        plan = greedy_plan(trace, replace(NO_LINK, budget=budget))
        us = predict(apply(trace, plan), NO_LINK).us - predict(trace, NO_LINK).us
        lines.append(f"{budget}: checkmate {solved(trace, budget).us:g}, greedy {us:g}")
    return "\n".join(lines) + "\n"
