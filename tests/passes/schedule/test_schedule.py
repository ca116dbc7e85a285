"""Each fate as decisions, and what every schedule keeps to."""

from __future__ import annotations

from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st

from passes import Link, Machine, Offload, Recompute, Reload, Trace, apply, check, lifetimes, parse, predict
from passes.analysis.reuse_gaps import ReuseGaps
from passes.schedule.schedule import OFFLOADED, Placement, placement_of, schedule
from tests.support.interpreter import run
from tests.support.strategies import LINKS, legal_fates, machines, traces

# A chain of three; each is read twice in backward.
STEP = parse("""
    forward:
    x = input()  # u8[100] | makes x:100
    d = tangent()  # u8[100] | makes d:100
    a = f(x)  # u8[100] | makes a:100 | 10.0 us
    b = f(a)  # u8[100] | makes b:100 | 10.0 us
    c = f(b)  # u8[100] | makes c:100 | 10.0 us
    o = f(c)  # u8[100] | makes o:100 | 10.0 us
    backward:
    p = g(d, c)  # u8[100] | makes p:100 | 10.0 us
    q = g(p, b)  # u8[100] | makes q:100 | 10.0 us
    r = g(q, a)  # u8[100] | makes r:100 | 10.0 us
    s = g(r, a, b, c)  # u8[100] | makes s:100 | 10.0 us
    return output o, gradient s
""")
PARTS = parse("""
    forward:
    x = input()  # u8[100] | makes x:100
    d = tangent()  # u8[100] | makes d:100
    a = f(x)  # u8[100] | makes a:100 | 10.0 us
    v = view(a)  # u8[100] | holds a
    n = norm(v)  # u8[100], u8[5] | makes n.0:100, n.1:5 | 10.0 us
    y = getitem(n)  # u8[100] | holds n.0
    m = getitem(n)  # u8[5] | holds n.1
    o = f(y)  # u8[100] | makes o:100 | 10.0 us
    backward:
    p = g(d, m)  # u8[100] | makes p:100 | 10.0 us
    q = g(p, y)  # u8[100] | makes q:100 | 10.0 us
    r = g(q, v)  # u8[100] | makes r:100 | 10.0 us
    return output o, gradient r
""")
LINKED = Machine(0, link=Link(out=10.0, back=10.0))


def decided(trace: Trace, machine: Machine = LINKED, **fates: Placement) -> str:
    """The decisions that carry out `fates`; `n_0` stands for `n.0`."""
    plan = schedule(ReuseGaps(trace), {storage.replace("_", "."): known for storage, known in fates.items()}, machine)
    applied = apply(trace, plan)
    check(applied)
    before, after = run(trace), run(applied)
    assert (after.computed, after.handed) == (before.computed, before.handed)
    return "\n".join(map(str, plan)) + "\n"


def test_what_is_kept_needs_no_decision() -> None:
    assert schedule(ReuseGaps(STEP), {}, LINKED) == ()
    assert schedule(ReuseGaps(STEP), dict.fromkeys("abc", Placement.KEEP), LINKED) == ()


def test_what_is_recomputed_is_made_at_its_first_use_and_stays() -> None:
    assert_expected_inline(
        decided(STEP, b=Placement.RECOMPUTE),
        """\
recompute b: before q
""",
    )


def test_what_is_brief_is_made_for_each_use() -> None:
    assert_expected_inline(
        decided(STEP, b=Placement.RECOMPUTE_PER_USE),
        """\
recompute b: before q
recompute b: before s
""",
    )


def test_a_chain_is_recomputed_from_what_is_kept() -> None:
    assert_expected_inline(
        decided(STEP, a=Placement.RECOMPUTE, b=Placement.RECOMPUTE, c=Placement.RECOMPUTE),
        """\
recompute a: before p
recompute b: before p
recompute c: before p
""",
    )


def test_a_chain_is_recomputed_per_use() -> None:
    assert_expected_inline(
        decided(STEP, a=Placement.RECOMPUTE_PER_USE, b=Placement.RECOMPUTE_PER_USE),
        """\
recompute a: before q
recompute b: before q
recompute a: before r
recompute a: before s
recompute b: before s
""",
    )


def test_a_fast_link_copies_while_the_next_op_runs() -> None:
    assert_expected_inline(
        decided(STEP, a=Placement.OFFLOAD),
        """\
offload a: out b, free c
reload a: back q, use r
""",
    )


def test_a_slow_link_begins_early_and_ends_late() -> None:
    assert_expected_inline(
        decided(STEP, Machine(0, link=Link(out=4.0, back=4.0)), a=Placement.OFFLOAD, b=Placement.OFFLOAD),
        """\
offload b: out c, free o
reload b: back p, use q
offload a: out b, free o
reload a: back p, use r
""",
    )


def test_copies_never_leave_their_phase() -> None:
    assert_expected_inline(
        decided(STEP, Machine(0, link=Link(out=0.01, back=0.01)), a=Placement.OFFLOAD, c=Placement.OFFLOAD),
        """\
offload c: out o, free o
reload c: back p, use p
offload a: out b, free o
reload a: back p, use r
""",
    )


def test_a_blocking_offload_frees_the_value_for_all_of_its_gap() -> None:
    assert_expected_inline(
        decided(STEP, a=Placement.OFFLOAD_BLOCKING),
        """\
offload a: out b, free b
reload a: back r, use r
""",
    )


def test_a_value_can_be_reloaded_for_each_use() -> None:
    assert_expected_inline(
        decided(STEP, a=Placement.RELOAD_PER_USE),
        """\
offload a: out b, free b
reload a: back r, use r
reload a: back s, use s
""",
    )


def test_a_chain_can_start_from_what_comes_back() -> None:
    assert_expected_inline(
        decided(STEP, a=Placement.OFFLOAD_BLOCKING, b=Placement.RECOMPUTE),
        """\
offload a: out b, free b
reload a: back q, use q
recompute b: before q
""",
    )


def test_parts_that_have_a_use_later_are_taken_out_at_once() -> None:
    assert_expected_inline(
        decided(PARTS, n_0=Placement.RECOMPUTE, n_1=Placement.RECOMPUTE),
        """\
recompute n: before p
recompute y: before p
recompute m: before p
""",
    )


def test_an_op_with_several_results_is_recomputed_per_use() -> None:
    step = parse(str(PARTS).replace("g(q, v)", "g(q, m)"))
    assert_expected_inline(
        decided(step, n_1=Placement.RECOMPUTE_PER_USE),
        """\
recompute a: before p
recompute v: before p
recompute n: before p
recompute m: before p
recompute n: before r
recompute m: before r
""",
    )


def test_one_item_can_be_offloaded_and_the_other_recomputed() -> None:
    assert_expected_inline(
        decided(PARTS, n_0=Placement.OFFLOAD_BLOCKING, n_1=Placement.RECOMPUTE),
        """\
recompute n: before p
recompute m: before p
offload y: out o, free o
reload y: back q, use q
""",
    )


def test_a_view_is_recomputed_from_the_reloaded_value() -> None:
    assert_expected_inline(
        decided(PARTS, a=Placement.OFFLOAD_BLOCKING),
        """\
offload a: out n, free n
reload a: back r, use r
recompute v: before r
""",
    )


def test_a_value_that_backward_does_not_read_is_recomputed_if_needed() -> None:
    step = parse(str(STEP).replace("g(q, a)", "g(q)").replace("g(r, a, b, c)", "g(r, b, c)"))
    assert placement_of(ReuseGaps(step), {}, "a") is Placement.RECOMPUTE
    assert_expected_inline(
        decided(step, b=Placement.RECOMPUTE_PER_USE),
        """\
recompute a: before q
recompute b: before q
recompute b: before s
""",
    )


def test_what_may_run_once_is_kept_if_need_be() -> None:
    step = str(STEP).replace("g(q, a)", "g(q)").replace("g(r, a, b, c)", "g(r, b, c)")
    once = parse(step.replace("makes a:100 | 10.0 us", "makes a:100 | 10.0 us | once"))
    assert placement_of(ReuseGaps(once), {}, "a") is Placement.KEEP
    assert_expected_inline(
        decided(once, b=Placement.RECOMPUTE_PER_USE),
        """\
recompute b: before q
recompute b: before s
""",
    )


@given(st.data(), traces(), machines(LINKS[1:]))
def test_any_placements_are_carried_out_and_change_no_value(
    data: st.DataObject, trace: Trace, machine: Machine
) -> None:
    gaps = ReuseGaps(trace)
    applied = apply(trace, schedule(gaps, data.draw(legal_fates(gaps)), machine))
    check(applied)
    before, after = run(trace), run(applied)
    assert (after.computed, after.handed) == (before.computed, before.handed)


@given(st.data(), traces(), machines(LINKS[1:]))
def test_what_was_given_up_is_not_there_when_backward_begins(
    data: st.DataObject, trace: Trace, machine: Machine
) -> None:
    gaps = ReuseGaps(trace)
    fates = data.draw(legal_fates(gaps, homes=False))
    applied = apply(trace, schedule(gaps, fates, machine))
    lives = {life.storage: life for life in lifetimes(applied)}
    for storage, known in fates.items():
        if known is not Placement.KEEP and storage in gaps.uses:
            assert lives[storage].last < applied.boundary


@given(st.data(), traces(), machines(LINKS[1:]))
def test_forward_is_not_touched_but_by_offloads(data: st.DataObject, trace: Trace, machine: Machine) -> None:
    gaps = ReuseGaps(trace)
    plan = schedule(gaps, data.draw(legal_fates(gaps, homes=False)), machine)
    for decision in plan:
        match decision:
            case Recompute(before=op) | Reload(back=op):
                assert gaps.trace.index[op] >= trace.boundary
            case Offload(out=out, free=free):
                assert gaps.trace.index[out] <= gaps.trace.index[free] < trace.boundary
    applied = apply(trace, plan)
    assert not any(op.recomputes for op in applied.ops[: applied.boundary])


@given(st.data(), traces(), machines(LINKS[1:]))
def test_each_offloaded_storage_is_copied_out_once_and_others_never(
    data: st.DataObject, trace: Trace, machine: Machine
) -> None:
    gaps = ReuseGaps(trace)
    fates = data.draw(legal_fates(gaps, homes=False))
    plan = schedule(gaps, fates, machine)
    sent = [decision.value for decision in plan if isinstance(decision, Offload)]
    assert len(sent) == len(set(sent))
    assert set(sent) <= {gaps.whole_value[storage] for storage, known in fates.items() if known in OFFLOADED}
    assert {decision.value for decision in plan if isinstance(decision, Reload)} == set(sent)


@given(traces())
def test_copies_that_hide_cost_no_time(trace: Trace) -> None:
    gaps = ReuseGaps(trace)
    fast = Machine(0, link=Link(out=1e12, back=1e12))
    applied = apply(trace, schedule(gaps, dict.fromkeys(gaps.whole_value, Placement.OFFLOAD), fast))
    assert predict(applied, fast).us - sum(op.us for op in applied.ops) < 1e-3
