"""No plan that streams beats what is proven, whatever else it decides, and the planner finds such plans."""

from __future__ import annotations

from dataclasses import replace

import pytest
from expecttest import assert_expected_inline
from hypothesis import assume, given, note
from hypothesis import strategies as st

from passes import (
    BudgetError,
    Link,
    Machine,
    Offload,
    Plan,
    PlanResult,
    Reload,
    Stream,
    Streaming,
    Trace,
    apply,
    check,
    make_plan,
    parse,
    predict,
)
from passes.analysis.reuse_gaps import ReuseGaps
from passes.ir import decisions
from passes.lp import problem, state_vars
from passes.lp.model import PlanModel
from passes.lp.relax import relax
from passes.order.early_updates import update_early
from passes.schedule.copy_timing import retime_copies
from passes.schedule.schedule import STATE_OFFLOADED, Placement, schedule
from passes.search import greedy
from passes.search.optimize import optimize
from tests.oracle.exhaustive import all_fates, best_of
from tests.support.interpreter import run
from tests.support.strategies import traces

SMALL = 1e-6  # microseconds: what a solver's tolerance may add
SINGLE = (Placement.KEEP, Placement.RECOMPUTE, Placement.OFFLOAD, Placement.OFFLOAD_BLOCKING)


@pytest.fixture(autouse=True)
def _small_homes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problem, "SMALLEST_OFFLOAD", 1)
    monkeypatch.setattr(decisions, "CAST_WORKSPACE", 0)
    monkeypatch.setattr(greedy, "SMALLEST_STREAMED", 1)
    monkeypatch.setattr(state_vars, "SMALLEST_STREAMED", 1)


@st.composite
def trainings(draw: st.DrawFn, most: int = 4, inside: bool = False) -> Trace:
    """A chain of layers, each with a parameter or that of a layer before, and the update of what is trained: of some
    parameters as early as may be, of the others at the end; with `inside` of all as early as may be."""
    nbytes, us = st.sampled_from((100, 700, 1000, 4000)), st.sampled_from((0.0, 1.0, 5.0, 40.0, 300.0))
    work = st.sampled_from((0, 0, 500, 3000))
    count = draw(st.integers(1, most))
    own = [draw(st.integers(0, i)) if i and draw(st.integers(0, 3)) == 0 else i for i in range(count)]
    lines, sizes = ["forward:"], {i: draw(nbytes) for i in set(own)}
    lines += [
        f"s{i} = state()  # makes s{i}:{n} | u8[{2 * n}]".replace(f":{n} ", f":{2 * n} ") for i, n in sizes.items()
    ]
    lines += [f"w{i} = parameter()  # u8[{n}] | makes w{i}:{n}" for i, n in sizes.items()]
    grown = {i for i in sizes if draw(st.booleans())}
    lines += [f"h{i} = gradient()  # u8[{sizes[i]}] | makes h{i}:{sizes[i]}" for i in grown]
    lines += ["y0 = input()  # u8[10] | makes y0:10", "d = tangent()  # u8[10] | makes d:10"]
    for i, w in enumerate(own):
        lines.append(f"t{i} = t(w{w})  # u8[{sizes[w]}] | holds w{w}")
        n = draw(nbytes)
        lines.append(
            f"y{i + 1} = mm(y{i}, t{i})  # u8[{n}] | makes y{i + 1}:{n} | {draw(us)} us | workspace {draw(work)}"
        )
    lines += [
        f"o = sum(y{count})  # u8[4] | makes o:4 | 1.0 us",
        "backward:",
        f"g{count} = mul(d, y{count})  # u8[10] | makes g{count}:10 | 1.0 us",
    ]
    seen: dict[int, str] = {}
    for i, w in reversed(list(enumerate(own))):
        n, m = draw(nbytes), sizes[w]
        lines.append(
            f"g{i} = mm(g{i + 1}, {draw(st.sampled_from((f't{i}', f'w{w}')))})  # u8[{n}] | makes g{i}:{n} | {draw(us)} us | workspace {draw(work)}"
        )
        lines.append(f"e{i} = mm(g{i + 1}, y{i})  # u8[{m}] | makes e{i}:{m} | {draw(us)} us")
        before = seen.get(w, f"h{w}" if w in grown else "")
        seen[w] = f"e{i}"
        if before:
            lines.append(f"a{i} = add(e{i}, {before})  # u8[{m}] | makes a{i}:{m} | {draw(us)} us")
            seen[w] = f"a{i}"
    apart = {i for i in sizes if inside or draw(st.booleans())}
    rest = [i for i in sizes if i not in apart]
    lines.append("update:")
    lines += [f"u{i} = Adam.step(s{i}, {seen[i]}, w{i})  # {draw(us)} us | workspace {draw(work)}" for i in apart]
    reads = [*(f"s{i}" for i in rest), *(seen[i] for i in rest), *(f"w{i}" for i in rest)]
    if rest:
        lines.append(f"step = Adam.step({', '.join(reads)})  # {draw(us)} us | workspace {draw(work)}")
    handed = ["output o", *(f"gradient {seen[i]}" for i in rest)]
    trace = update_early(parse("\n".join([*lines, f"return {', '.join(handed)}"])))
    note(str(trace))
    check(trace)
    return trace


def homes(staging: tuple[int, ...] = (0, 100, 2000)) -> st.SearchStrategy[Machine]:
    rate = st.sampled_from((1.0, 30.0, 1000.0))
    return st.builds(
        Machine,
        st.just(0),
        link=st.builds(
            Link,
            rate,
            rate,
            st.sampled_from(staging),
            st.sampled_from((0.0, 3.0)),
            st.sampled_from((0.0, 0.01)),
            st.booleans(),
        ),
        streaming=st.builds(
            Streaming,
            st.just(True),
            window=st.sampled_from((0, 300, 2000)),
            update_staging=st.sampled_from((0, 200, 1500)),
            host_update_rate=st.sampled_from((0.0, 2.0, 50.0, 2000.0)),
        ),
    ).map(_without_windows_in_backward)


def _without_windows_in_backward(machine: Machine) -> Machine:
    """The machine as it is where the host updates states."""
    if not machine.streaming.host_update_rate:
        return machine
    streaming = replace(machine.streaming, update_staging=0)
    return replace(machine, streaming=streaming, link=replace(machine.link, half_duplex=False))


def fates_of(gaps: ReuseGaps, machine: Machine) -> dict[str, list[Placement]]:
    """The fates of every storage with which each value moves once."""
    single = {storage: [f for f in fates if f in SINGLE] for storage, fates in all_fates(gaps, machine).items()}
    return single | {storage: [Placement.KEEP, *STATE_OFFLOADED] for storage in gaps.streamable.values}


@given(trainings(), homes(), st.data())
def test_no_plan_that_streams_beats_the_bound_of_a_budget_that_it_just_fits(
    trace: Trace, machine: Machine, data: st.DataObject
) -> None:
    """Whenever its copies back begin, and whatever the host updates."""
    gaps = ReuseGaps(trace)
    fates = {storage: data.draw(st.sampled_from(may)) for storage, may in fates_of(gaps, machine).items()}
    plan = list(schedule(gaps, fates, machine))
    for i, decision in enumerate(plan):
        if isinstance(decision, Reload):
            back = data.draw(st.integers(gaps.trace.index[decision.back], gaps.trace.index[decision.use]))
            plan[i] = replace(decision, back=trace.ops[back].name)
        elif (
            isinstance(decision, Stream)
            and machine.streaming.host_update_rate
            and trace.op[decision.value].fn == "state"
        ):
            plan[i] = replace(decision, on=data.draw(st.sampled_from(("", "host"))))
    holds(trace, machine, tuple(plan))


@given(traces(max_forward=12), homes(), st.data())
def test_the_same_of_steps_of_any_kind(trace: Trace, machine: Machine, data: st.DataObject) -> None:
    gaps = ReuseGaps(trace)
    fates = {storage: data.draw(st.sampled_from(may)) for storage, may in fates_of(gaps, machine).items()}
    holds(trace, machine, schedule(gaps, fates, machine))


def holds(trace: Trace, machine: Machine, plan: Plan) -> None:
    """The bound for a plan's peak as the budget holds for that plan."""
    assume(plan)
    captured, forecast = predict(trace, machine), predict(apply(trace, plan), machine)
    note("\n".join(map(str, plan)))
    model = PlanModel(problem.PlanProblem(ReuseGaps(trace), machine), forecast.peak)
    relaxed, choice = relax(model), PlanResult(plan, captured, forecast)
    assert relaxed is not None
    assert relaxed.any_us <= forecast.us - captured.us + SMALL
    if choice.is_single:
        assert relaxed.solution is not None
        assert relaxed.solution.us - model.columns.tie_us <= forecast.us - captured.us + SMALL


@pytest.mark.long
@given(trainings(most=2), homes(), st.floats(0.0, 1.0))
def test_no_choice_of_placements_beats_the_bound(trace: Trace, machine: Machine, share: float) -> None:
    none_beats_the_bound(trace, machine, share)


@pytest.mark.long
@given(trainings(most=2, inside=True), homes(), st.floats(0.0, 1.0))
def test_none_beats_it_where_all_updates_run_in_backward(trace: Trace, machine: Machine, share: float) -> None:
    assert all(op.name != "step" for op in trace.ops)
    none_beats_the_bound(trace, machine, share)


def none_beats_the_bound(trace: Trace, machine: Machine, share: float) -> None:
    """The bound for a budget between the extremes holds for every plan that fits it."""
    gaps = ReuseGaps(trace)
    choices = fates_of(gaps, machine)
    many = 1
    for may in choices.values():
        many *= len(may)
    assume(many < 5000)
    found = problem.PlanProblem(gaps, machine)
    least, most = int(found.floor.max()), found.captured.peak
    machine = replace(machine, budget=least + int((most - least) * share))
    best = best_of(gaps, choices, machine)
    proposal = optimize(trace, machine)
    assert best is None or max(proposal.bound_us, proposal.any_us) <= best[0] + SMALL
    if proposal.plan:
        forecast = predict(apply(trace, proposal.plan), machine)
        assert forecast.peak <= machine.budget


@given(trainings(), homes(), st.floats(0.0, 1.0), st.data())
def test_copies_that_are_timed_otherwise_change_no_value(
    trace: Trace, machine: Machine, share: float, data: st.DataObject
) -> None:
    gaps = ReuseGaps(trace)
    fates = {storage: data.draw(st.sampled_from(may)) for storage, may in fates_of(gaps, machine).items()}
    plan = schedule(gaps, fates, machine)
    forecast = predict(apply(trace, plan), machine)
    timed, after = retime_copies(gaps, replace(machine, budget=int(forecast.peak * share)), plan, forecast)
    applied = apply(trace, timed)
    check(applied)
    plain, ran = run(trace, machine.streaming.window), run(applied, machine.streaming.window)
    assert (ran.computed, ran.handed) == (plain.computed, plain.handed)
    assert after.peak == predict(applied, machine).peak
    assert after.us <= forecast.us + SMALL or after.peak < forecast.peak
    assert {said for said in plan if not isinstance(said, Offload | Reload)} <= {*timed} and len(timed) <= len(plan)


# A chain of four layers whose states are most of it; the links are slow.
CHAIN = parse(
    "\n".join(
        [
            "forward:",
            *(f"s{i} = state()  # u8[2000] | makes s{i}:2000" for i in range(4)),
            *(f"w{i} = parameter()  # u8[1000] | makes w{i}:1000" for i in range(4)),
            "y0 = input()  # u8[100] | makes y0:100",
            "d = tangent()  # u8[100] | makes d:100",
            *(f"y{i + 1} = mm(y{i}, w{i})  # u8[100] | makes y{i + 1}:100 | 50.0 us" for i in range(4)),
            "backward:",
            "g4 = mul(d, y4)  # u8[100] | makes g4:100 | 1.0 us",
            *(
                f"g{i} = mm(g{i + 1}, w{i})  # u8[100] | makes g{i}:100 | 50.0 us\n"
                f"e{i} = mm(g{i + 1}, y{i})  # u8[1000] | makes e{i}:1000 | 50.0 us"
                for i in reversed(range(4))
            ),
            "update:",
            "step = Adam.step(s0, s1, s2, s3, e0, e1, e2, e3, w0, w1, w2, w3)  # 100.0 us | workspace 500",
            "return output y4, gradient e0, gradient e1, gradient e2, gradient e3",
        ]
    )
)


def test_a_chain_is_planned_near_what_is_proven() -> None:
    machine, lines = Machine(0, link=Link(out=20.0, back=20.0), streaming=Streaming(enabled=True, window=500)), []
    for budget in (16_000, 12_000, 8_000, 6_000, 4_000, 3_000):
        machine = replace(machine, budget=budget)
        quick = predict(apply(CHAIN, greedy.greedy_plan(CHAIN, machine)), machine)
        choice = make_plan(CHAIN, machine)
        lines.append(
            f"{budget}: greedy {quick.us:.0f} us, plan {choice.forecast.us:.0f} us, {choice.lower_bound:.0f} proven"
        )
        assert choice.forecast.peak <= budget
    assert_expected_inline(
        "\n".join(lines),
        """\
16000: greedy 751 us, plan 701 us, 701 proven
12000: greedy 1051 us, plan 951 us, 951 proven
8000: greedy 1451 us, plan 1351 us, 1351 proven
6000: greedy 1651 us, plan 1551 us, 1551 proven
4000: greedy 2151 us, plan 1851 us, 1751 proven
3000: greedy 2401 us, plan 2056 us, 1851 proven""",
    )


def test_a_budget_below_all_that_must_be_there_is_refused_with_that_number() -> None:
    machine = Machine(1000, link=Link(out=20.0, back=20.0), streaming=Streaming(enabled=True, window=500))
    floor = int(problem.PlanProblem(ReuseGaps(CHAIN), machine).floor.max())
    with pytest.raises(BudgetError, match=f"No plan can use less than {floor} bytes"):
        make_plan(CHAIN, machine)


def test_where_only_states_may_be_offloaded_nothing_else_is() -> None:
    machine = Machine(
        0, link=Link(out=20.0, back=20.0), streaming=Streaming(enabled=True, only_states=True, window=500)
    )
    for budget in (16_000, 12_000, 9_500):
        machine = replace(machine, budget=budget)
        for plan in (greedy.greedy_plan(CHAIN, machine), make_plan(CHAIN, machine).plan):
            applied = apply(CHAIN, plan)
            assert predict(applied, machine).peak <= budget
            assert {op.fn for op in applied.ops if op.offloaded} <= {"state"}
            assert all(applied.op[value].fn == "mm" for kind, value in applied.outputs if kind == "gradient")
    with pytest.raises(BudgetError):
        make_plan(CHAIN, replace(machine, budget=8_000))
