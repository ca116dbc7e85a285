"""Laws of places, costs, cuts and stages, on random steps; a step with a skip and a shared parameter as text."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import pytest
from expecttest import assert_expected_inline
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from passes import BudgetError, Machine, PlanResult, Trace, check, make_plan, parse
from passes.concurrent_forwards import plan_forwards, unplanned_nbytes
from passes.ir.liveness import RELEASED
from passes.ir.machine import Link
from passes.pipeline import QUICK
from passes.stages.cut import Cut, PlanStage, Stage, all_bounds, balanced_cut, best_cut
from passes.stages.interval_costs import IntervalCosts
from passes.stages.places import Places, computes
from passes.stages.stage_trace import stage_trace
from tests.support.strategies import traces as all_traces

SKIP = parse(
    """
    forward:
    w = parameter()  # makes w:40
    v = parameter()  # makes v:50
    x = input()  # makes x:10
    t = tangent()  # makes t:1
    a = mm(x, w)  # makes a:11 | 5.0 us
    b = relu(a)  # makes b:12 | 1.0 us
    c = mm(b, v)  # makes c:13 | 6.0 us
    u = view(a)  # holds a
    d = add(c, u)  # makes d:14 | 1.0 us
    e = mm(d, w)  # makes e:15 | 5.0 us
    backward:
    ge = mm(t, w)  # makes ge:14 | 5.0 us
    gw2 = mm(t, d)  # makes gw2:40 | 5.0 us
    gv = mm(ge, b)  # makes gv:50 | 6.0 us
    gb = mm(ge, v)  # makes gb:12 | 6.0 us
    gr = relu_backward(gb, b)  # makes gr:11 | 1.0 us
    ga = add(gr, ge)  # makes ga:11 | 1.0 us
    gw1 = mm(ga, x)  # makes gw1:40 | 5.0 us
    gw = add(gw1, gw2)  # makes gw:40 | 1.0 us
    return output e, gradient gw, gradient gv
    """
)
SUMS = frozenset({"gw"})


def test_the_stages_of_a_step_with_a_skip_and_a_shared_parameter() -> None:
    places = Places(SKIP, SUMS)
    costs = IntervalCosts(places)
    cut = best_cut(costs, [math.inf, math.inf], [2, 1])
    texts = (str(stage_trace(places, stage.begin, stage.end)) for stage in cut.stages)
    shown = [f"{stage}: {us} us\n{text}" for stage, us, text in zip(cut.stages, cut.us, texts, strict=True)]
    assert_expected_inline(
        "\n".join(shown),
        """\
Stage(number=0, begin=0, end=8, forwards=2): 31.0 us
forward:
ge = tangent()  # makes ge:14
w = parameter()  # makes w:40
v = parameter()  # makes v:50
x = input()  # makes x:10
a = mm(x, w)  # makes a:11 | 5.0 us
b = relu(a)  # makes b:12 | 1.0 us
c = mm(b, v)  # makes c:13 | 6.0 us
backward:
gv = mm(ge, b)  # makes gv:50 | 6.0 us
gb = mm(ge, v)  # makes gb:12 | 6.0 us
gr = relu_backward(gb, b)  # makes gr:11 | 1.0 us
ga = add(gr, ge)  # makes ga:11 | 1.0 us
gw1 = mm(ga, x)  # makes gw1:40 | 5.0 us
return gradient gw1, gradient gv, released a, released c

Stage(number=1, begin=8, end=10, forwards=1): 16.0 us
forward:
a = input()  # makes a:11
c = input()  # makes c:13
w = parameter()  # makes w:40
t = tangent()  # makes t:1
u = view(a)  # holds a
d = add(c, u)  # makes d:14 | 1.0 us
e = mm(d, w)  # makes e:15 | 5.0 us
backward:
ge = mm(t, w)  # makes ge:14 | 5.0 us
gw2 = mm(t, d)  # makes gw2:40 | 5.0 us
return output e, gradient gw2, input_gradient ge
""",
    )


def traces(max_forward: int = 25) -> st.SearchStrategy[Trace]:
    return all_traces(max_forward).map(without_update)


def without_update(trace: Trace) -> Trace:
    return Trace(tuple(op for op in trace.ops if op.phase != "update" and op.fn != "state"), trace.outputs)


@given(traces())
def test_places_fall_along_backward_and_data_flows_one_way(trace: Trace) -> None:
    places = Places(trace)
    boundary, place, index = trace.boundary, places.place, {op.name: i for i, op in enumerate(trace.ops)}
    computed = [i for i in range(boundary, len(trace.ops)) if not trace.ops[i].is_input]
    assert list(place[computed]) == sorted(place[computed], reverse=True)
    for i in computed:
        for storage in places.reads[i]:
            made = places.producer[storage]
            if not trace.ops[made].is_input:
                assert place[made] <= place[i] if made < boundary else place[made] >= place[i]
    assert all(index[op.name] == place[i] for i, op in enumerate(trace.ops[:boundary]))


@given(traces(max_forward=10))
def test_costs_are_those_of_each_interval(trace: Trace) -> None:
    costs = IntervalCosts(Places(trace))
    for i, j in itertools.combinations(range(len(costs.borders)), 2):
        begin, end = costs.borders[i], costs.borders[j]
        inside = {op.name for op, place in zip(trace.ops, costs.places.place, strict=True) if begin <= place < end}
        stage = stage_trace(costs.places, begin, end)
        assert costs.us[i, j] == sum(op.us for op in stage.ops)
        saved = {
            held
            for op in trace.ops[trace.boundary :]
            if op.name in inside and computes(op)
            for read in op.reads
            for held in trace.op[read].holds
            if costs.places.producer[held] < trace.boundary and not trace.ops[costs.places.producer[held]].is_input
        }
        assert costs.saved[i, j] == sum(trace.nbytes[held] for held in saved)
        kept = [op for op in stage.ops if op.fn in ("parameter", "buffer")]
        handed = {held for kind, value in stage.outputs if kind == "gradient" for held in stage.op[value].holds}
        made = [op for op in stage.ops if not op.is_input]
        gradients = sum(storage.nbytes for op in made for storage in op.makes if storage.name in handed)
        assert costs.resident[i, j] == sum(op.nbytes for op in kept) + gradients


@given(traces(max_forward=10))
def test_what_crosses_a_border_is_what_both_sides_receive(trace: Trace) -> None:
    costs = IntervalCosts(Places(trace))
    given_ = {op.name for op in trace.ops if op.is_input}
    for i in range(1, len(costs.borders) - 1):
        border = costs.borders[i]
        stages = stage_trace(costs.places, 0, border), stage_trace(costs.places, border, trace.boundary)
        received = [op for stage in stages for op in stage.ops if op.is_input and op.name not in given_]
        assert costs.crossing[i] == sum(op.nbytes for op in received)


@given(traces(max_forward=10), st.data())
def test_each_op_runs_in_one_stage_and_what_is_received_was_sent(trace: Trace, data: st.DataObject) -> None:
    costs = IntervalCosts(Places(trace))
    assume(len(costs.borders) > 2)
    count = data.draw(st.integers(2, min(4, len(costs.borders) - 1)))
    inner = data.draw(st.permutations(costs.borders[1:-1]))[: count - 1]
    cut = balanced_cut(costs, [0, *sorted(inner)], [1] * count)
    stages = [stage_trace(costs.places, stage.begin, stage.end) for stage in cut.stages]
    for stage in stages:
        check(stage)
    ran = [op.name for stage in stages for op in stage.ops if computes(op)]
    assert sorted(ran) == sorted(op.name for op in trace.ops if computes(op))
    given_ = {op.name for op in trace.ops if op.is_input}
    received = {op.name for stage in stages for op in stage.ops if op.fn in ("input", "tangent", "received")} - given_
    kinds = (RELEASED, "input_gradient")
    sent = {value for stage in stages for kind, value in stage.outputs if kind in kinds and value in ran_or_item(trace)}
    assert received == sent - {value for kind, value in trace.outputs if kind == "input_gradient"}
    returned = [out for stage in stages for out in stage.outputs if out[0] not in kinds]
    assert sorted(returned) == sorted(set(trace.outputs))


def ran_or_item(trace: Trace) -> set[str]:
    return {op.name for op in trace.ops}


@given(traces(max_forward=8), st.integers(1, 4), st.data())
def test_no_cut_is_better(trace: Trace, count: int, data: st.DataObject) -> None:
    costs = IntervalCosts(Places(trace))
    assume(len(costs.borders) > count)
    size = len(costs.borders)
    extra = data.draw(st.lists(st.integers(0, 40), min_size=size * size * count, max_size=size * size * count))
    limits = data.draw(st.lists(st.sampled_from([100, 3000, 10_000, 10**9]), min_size=count, max_size=count))

    def planned(stage: Stage) -> float:
        i, j = costs.borders.index(stage.begin), costs.borders.index(stage.end)
        if costs.resident[i, j] > limits[stage.number]:
            return math.inf
        return float(costs.us[i, j]) + extra[(stage.number * size + i) * size + j]

    every = [cut_of(costs, at, planned) for at in itertools.combinations(range(1, size - 1), count - 1)]
    best = min(every, default=math.inf)
    try:
        cut = best_cut(costs, limits, [1] * count, planned, copy_us=0.0)
    except BudgetError:
        assert best == math.inf
        return
    assert cut.bound <= best <= cut.slowest_us <= cut.bound * 1.02


def cut_of(costs: IntervalCosts, inner: Sequence[int], planned: PlanStage) -> float:
    at = [0, *inner, len(costs.borders) - 1]
    stages = (Stage(k, costs.borders[i], costs.borders[j], 1) for k, (i, j) in enumerate(itertools.pairwise(at)))
    return max(map(planned, stages))


@given(traces(max_forward=10), st.integers(1, 3), st.integers(1, 3))
def test_bounds_without_a_tier_are_below_what_keeps_the_budget(trace: Trace, count: int, forwards: int) -> None:
    """A stage that keeps its budget recomputes at least what the bound says: here all that it saves, and nothing."""
    costs = IntervalCosts(Places(trace))
    assume(len(costs.borders) > count)
    whole = float(costs.us[0, -1])
    cut = best_cut(costs, [math.inf] * count, [forwards] * count)
    assert cut.slowest_us * count >= whole - 1e-6
    roomy = int((costs.resident + forwards * costs.saved).max())
    assert best_cut(costs, [roomy] * count, [forwards] * count).us == cut.us


def chain(layers: Sequence[tuple[int, float]]) -> Trace:
    """Return a step of layers, each with a value of so many bytes that backward reads, and its microseconds."""
    forward = [f"a{i} = f(a{i - 1})  # makes a{i}:{nbytes} | {us} us" for i, (nbytes, us) in enumerate(layers, 1)]
    count = len(layers)
    backward = [f"g{i} = b(g{i + 1}, a{i})  # makes g{i}:1 | 1.0 us" for i in range(count, 0, -1)]
    given = ["w = parameter()  # makes w:1", f"g{count + 1} = tangent()  # makes g{count + 1}:1"]
    first = ["a0 = f(w)  # makes a0:1 | 1.0 us"]
    lines = ["forward:", *given, *first, *forward, "backward:", *backward, f"return output a{count}, gradient g1"]
    return parse("\n".join(lines))


def quick(trace: Trace, machine: Machine) -> PlanResult:
    return make_plan(trace, machine, QUICK)


@pytest.mark.long
@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(50, 200), st.sampled_from([1.0, 4.0, 20.0])), min_size=4, max_size=10),
    st.integers(1, 3),
    st.sampled_from([0.0, 0.01, 0.05, math.inf]),
    st.floats(0.4, 1.0),
)
def test_no_plan_is_faster_than_the_bound(
    layers: list[tuple[int, float]], forwards: int, us_per_byte: float, share: float
) -> None:
    """Plans that recompute, and copy if they may, with a link that takes no time but that of compute."""
    trace = chain(layers)
    costs = IntervalCosts(Places(trace))
    stage = stage_trace(costs.places, 0, trace.boundary)
    link = Link(out=1e9, back=1e9, us_per_byte=us_per_byte) if us_per_byte < math.inf else Link()
    budget = int(share * unplanned_nbytes(stage, Machine(1 << 40), forwards))
    bound = all_bounds(costs, [budget], [forwards], 2 * us_per_byte)[0][0, -1]
    with suppress(BudgetError):
        choice = plan_forwards(stage, Machine(budget, link=link), forwards, quick)
        assert bound <= choice.forecast.us * (1 + 1e-9)


def test_a_tier_takes_no_more_than_copying_what_does_not_fit() -> None:
    costs = IntervalCosts(Places(SKIP, SUMS))
    plain = float(costs.us[0, -1])
    budget = int(costs.resident[0, -1] + costs.saved[0, -1]) - 20
    more = [best_cut(costs, [budget], [1], copy_us=copy_us).us[0] - plain for copy_us in (0.0, 0.01, math.inf)]
    assert more == pytest.approx([0.0, 0.2, recomputed(costs, 20)])


def recomputed(costs: IntervalCosts, nbytes: int) -> float:
    """Return the least time to recompute so many bytes, the cheapest first, by hand."""
    left, us = float(nbytes), 0.0
    for _, size, time in zip(*costs.makers, strict=True):
        part = min(left, size)
        us, left = us + time * part / size, left - part
    return us


def test_a_budget_that_no_cut_keeps_names_the_stage() -> None:
    costs = IntervalCosts(Places(SKIP, SUMS))
    with pytest.raises(BudgetError, match="stage 1 is allowed 60 bytes, and its parameters and gradients alone"):
        best_cut(costs, [10_000, 60], [2, 1])


def test_more_stages_than_ops_are_refused() -> None:
    with pytest.raises(ValueError, match="40 stages are wanted, and the step can be cut into 5"):
        best_cut(IntervalCosts(Places(SKIP, SUMS)), [math.inf] * 40, [1] * 40)


def test_places_that_do_not_rise_are_refused() -> None:
    costs = IntervalCosts(Places(SKIP, SUMS))
    with pytest.raises(ValueError, match="can't begin at places"):
        balanced_cut(costs, [0, 8, 6], [1, 1, 1])


def test_an_input_that_an_op_writes_is_read_in_one_stage() -> None:
    trace = parse(
        """
        forward:
        n = buffer()  # makes n:4
        m = buffer()  # makes m:4
        x = input()  # makes x:10
        t = tangent()  # makes t:1
        w = add_(n)  # holds n | once
        a = relu(x)  # makes a:10
        b = mul(a, n)  # makes b:10
        c = mul(b, m)  # makes c:10
        d = mul(c, m)  # makes d:10
        return output d
        """
    )
    assert [trace.ops[cut].name for cut in Places(trace).cuts] == ["c", "d"]


def test_recomputing_moves_the_cut() -> None:
    costs = IntervalCosts(Places(SKIP, SUMS))
    free = best_cut(costs, [math.inf, math.inf], [4, 1])
    tight = best_cut(costs, [230, math.inf], [4, 1])
    assert isinstance(tight, Cut) and tight.slowest_us >= free.slowest_us
    assert np.isfinite(tight.slowest_us)
